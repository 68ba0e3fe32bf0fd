// A slow disk for one process and its children (LD_PRELOAD): opening a file whose path has $SLOW_PATH in it takes
// $SLOW_OPEN_NS longer, each read $SLOW_READ_NS, each write $SLOW_WRITE_NS.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static const char *where;
static long long open_ns, read_ns, write_ns;

__attribute__((constructor)) static void begin(void) {
  const char *v;
  where = getenv("SLOW_PATH");
  if ((v = getenv("SLOW_OPEN_NS"))) open_ns = atoll(v);
  if ((v = getenv("SLOW_READ_NS"))) read_ns = atoll(v);
  if ((v = getenv("SLOW_WRITE_NS"))) write_ns = atoll(v);
}

static void wait_ns(const char *path, long long ns) {
  struct timespec t = {ns / 1000000000, ns % 1000000000};
  if (ns > 0 && where && *where && path && strstr(path, where)) nanosleep(&t, NULL);
}

static void wait_fd(int fd, long long ns) {
  char link[64], path[4096];
  if (ns <= 0 || !where) return;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n <= 0) return;
  path[n] = 0;
  wait_ns(path, ns);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define OPEN(name, parameters, ...) \
  int name parameters { \
    va_list more; \
    va_start(more, flags); \
    int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, int) : 0; \
    va_end(more); \
    if ((flags & O_DIRECTORY) == 0) wait_ns(path, open_ns); \
    return NEXT(name)(__VA_ARGS__, flags, mode); \
  }
OPEN(open, (const char *path, int flags, ...), path)
OPEN(open64, (const char *path, int flags, ...), path)
OPEN(openat, (int folder, const char *path, int flags, ...), folder, path)
OPEN(openat64, (int folder, const char *path, int flags, ...), folder, path)

FILE *fopen(const char *path, const char *mode) { wait_ns(path, open_ns); return NEXT(fopen)(path, mode); }
FILE *fopen64(const char *path, const char *mode) { wait_ns(path, open_ns); return NEXT(fopen64)(path, mode); }

ssize_t read(int fd, void *to, size_t size) {
  ssize_t n = NEXT(read)(fd, to, size);
  if (n > 0) wait_fd(fd, read_ns);
  return n;
}
ssize_t pread(int fd, void *to, size_t size, off_t at) {
  ssize_t n = NEXT(pread)(fd, to, size, at);
  if (n > 0) wait_fd(fd, read_ns);
  return n;
}
ssize_t pread64(int fd, void *to, size_t size, off64_t at) {
  ssize_t n = NEXT(pread64)(fd, to, size, at);
  if (n > 0) wait_fd(fd, read_ns);
  return n;
}
ssize_t write(int fd, const void *from, size_t size) {
  wait_fd(fd, write_ns);
  return NEXT(write)(fd, from, size);
}
