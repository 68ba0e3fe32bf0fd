// A slow disk, for one process and its children: reads and writes of files whose path has $STALL_PATH in it take
// $STALL_NS longer, or what stall_each() says. The sum of all is in the file $STALL_LOG, one number of 8 bytes.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static _Atomic long long each_ns, *total_ns, own_ns;
static const char *where = "";

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("STALL_PATH"), *ns = getenv("STALL_NS"), *log = getenv("STALL_LOG");
  int file = log ? open(log, O_RDWR | O_CREAT, 0644) : -1;
  total_ns = &own_ns;
  if (file >= 0 && !ftruncate(file, 8)) {
    void *shared = mmap(NULL, 8, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shared != MAP_FAILED) total_ns = shared;
  }
  if (file >= 0) close(file);
  if (path) where = strdup(path);
  if (ns) each_ns = atoll(ns);
}

void stall_each(long long ns) { each_ns = ns; }
long long stalled_ns(void) { return *total_ns; }

static void stall(int file) {
  char link[64], path[4096];
  struct timespec before, after, wait = {each_ns / 1000000000, each_ns % 1000000000};
  if (each_ns <= 0 || !*where) return;
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length <= 0) return;
  path[length] = 0;
  if (!strstr(path, where)) return;
  clock_gettime(CLOCK_MONOTONIC, &before);
  nanosleep(&wait, NULL);
  clock_gettime(CLOCK_MONOTONIC, &after);
  *total_ns += (after.tv_sec - before.tv_sec) * 1000000000LL + after.tv_nsec - before.tv_nsec;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define SLOW(type, name, parameters, ...) \
  type name parameters { \
    static __typeof__(&name) next; \
    if (!next) next = NEXT(name); \
    type done = next(__VA_ARGS__); \
    if (done > 0) stall(file); \
    return done; \
  }

SLOW(ssize_t, read, (int file, void *to, size_t size), file, to, size)
SLOW(ssize_t, write, (int file, const void *from, size_t size), file, from, size)
SLOW(ssize_t, pread, (int file, void *to, size_t size, off_t at), file, to, size, at)
SLOW(ssize_t, pread64, (int file, void *to, size_t size, off64_t at), file, to, size, at)
SLOW(ssize_t, writev, (int file, const struct iovec *parts, int count), file, parts, count)
