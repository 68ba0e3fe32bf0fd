/* Counts the CPU time that threads spend while they have released the GIL: preloaded before libpython (gil.py).

   PyEval_SaveThread releases the GIL, PyEval_RestoreThread takes it again; every Py_BEGIN_ALLOW_THREADS, `with nogil`
   of Cython and ReleaseGIL of OpenCV is a pair of them in one thread. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

static _Atomic int64_t released_ns, releases;
static _Thread_local int64_t released_at_ns;

static int64_t thread_cpu_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void *PyEval_SaveThread(void) {
    static void *(*next)(void);
    if (!next) next = (void *(*)(void))dlsym(RTLD_NEXT, "PyEval_SaveThread");
    void *state = next();
    released_at_ns = thread_cpu_ns();
    return state;
}

void PyEval_RestoreThread(void *state) {
    static void (*next)(void *);
    if (!next) next = (void (*)(void *))dlsym(RTLD_NEXT, "PyEval_RestoreThread");
    released_ns += thread_cpu_ns() - released_at_ns;
    releases++;
    next(state);
}

int64_t gil_released_ns(void) { return released_ns; }
int64_t gil_releases(void) { return releases; }
