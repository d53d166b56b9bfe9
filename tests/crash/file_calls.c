// Counts the file operations below one folder, and makes one of them fail. Loaded by LD_PRELOAD; see file_calls.py.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <dirent.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { PASS, ERROR, LOST, FULL, KILL_BEFORE, KILL_AFTER };

static char folder[4096], what[4300];
static long at, seen;
static int mode, reads;
static char marked[65536];

// Fail operation number `n` (from 1) below the folder, in that mode; count reading operations only if asked to.
void calls_arm(const char *where, long n, int how, int count_reads) {
    seen = 0; at = n; mode = how; reads = count_reads; what[0] = 0;
    strncpy(folder, where, sizeof folder - 1);
}
long calls_seen(void) { return seen; }
const char *calls_failed(void) { return what; }

static int below(const char *path) { return folder[0] && path && strncmp(path, folder, strlen(folder)) == 0; }

static int due(int reading, const char *name, const char *path) {
    if (!folder[0] || (reading && !reads)) return PASS;
    if (__atomic_add_fetch(&seen, 1, __ATOMIC_SEQ_CST) != at) return PASS;
    snprintf(what, sizeof what, "%s %s", name, path ? path + strlen(folder) : "");
    if (mode == KILL_BEFORE) kill(getpid(), SIGKILL);
    return mode;
}

// ERROR and FULL come instead of the operation, LOST and KILL_AFTER when it has been done.
#define ACT(reading, name, path, type, call)                                      \
    int how = due(reading, name, path);                                           \
    if (how == ERROR || how == FULL) { errno = how == FULL ? ENOSPC : EIO; return (type)-1; } \
    type got = call;                                                              \
    if (how == KILL_AFTER) kill(getpid(), SIGKILL);                               \
    if (how == LOST) { errno = EIO; return (type)-1; }                            \
    return got;

#define REAL(name, type, ...) static type (*real)(__VA_ARGS__); if (!real) *(void **)&real = dlsym(RTLD_NEXT, name)

static int mark(int fd, const char *path) {
    if (fd >= 0 && fd < (int)sizeof marked) marked[fd] = path != NULL;
    return fd;
}

static int opened(const char *name, const char *path, int flags, int (*go)(void *), void *with) {
    if (!below(path)) return mark(go(with), NULL);
    int how = due((flags & O_ACCMODE) == O_RDONLY, name, path);
    if (how == ERROR || how == FULL) { errno = how == FULL ? ENOSPC : EIO; return -1; }
    int fd = mark(go(with), path);
    if (how == KILL_AFTER) kill(getpid(), SIGKILL);
    if (how == LOST) { if (fd >= 0) close(fd); errno = EIO; return -1; }
    return fd;
}

struct opening { int (*real)(const char *, int, ...); int (*real_at)(int, const char *, int, ...); int dir; const char *path; int flags; mode_t how; };
static int go_open(void *p) { struct opening *o = p; return o->real(o->path, o->flags, o->how); }
static int go_openat(void *p) { struct opening *o = p; return o->real_at(o->dir, o->path, o->flags, o->how); }

#define OPEN(function)                                                            \
    int function(const char *path, int flags, ...) {                              \
        REAL(#function, int, const char *, int, ...);                             \
        va_list more; va_start(more, flags); mode_t m = va_arg(more, mode_t); va_end(more); \
        struct opening o = {real, NULL, 0, path, flags, m};                       \
        return opened("open", path, flags, go_open, &o);                          \
    }
#define OPENAT(function)                                                          \
    int function(int dir, const char *path, int flags, ...) {                     \
        REAL(#function, int, int, const char *, int, ...);                        \
        va_list more; va_start(more, flags); mode_t m = va_arg(more, mode_t); va_end(more); \
        struct opening o = {NULL, real, dir, path, flags, m};                     \
        return opened("open", path, flags, go_openat, &o);                        \
    }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)

#define ON_FD(function, name, type, reading, declared, passed)                    \
    type function declared {                                                      \
        REAL(#function, type, ON_FD_TYPES_##function);                            \
        if (fd < 0 || fd >= (int)sizeof marked || !marked[fd]) return real passed; \
        ACT(reading, name, NULL, type, real passed)                               \
    }
#define ON_FD_TYPES_read int, void *, size_t
#define ON_FD_TYPES_readv int, const struct iovec *, int
#define ON_FD_TYPES_write int, const void *, size_t
#define ON_FD_TYPES_writev int, const struct iovec *, int
#define ON_FD_TYPES_pread int, void *, size_t, off_t
#define ON_FD_TYPES_pread64 int, void *, size_t, off_t
#define ON_FD_TYPES_pwrite int, const void *, size_t, off_t
#define ON_FD_TYPES_pwrite64 int, const void *, size_t, off_t
#define ON_FD_TYPES_fsync int
#define ON_FD_TYPES_fdatasync int
#define ON_FD_TYPES_ftruncate int, off_t
#define ON_FD_TYPES_ftruncate64 int, off_t
ON_FD(read, "read", ssize_t, 1, (int fd, void *b, size_t n), (fd, b, n))
ON_FD(readv, "read", ssize_t, 1, (int fd, const struct iovec *v, int n), (fd, v, n))
ON_FD(pread, "read", ssize_t, 1, (int fd, void *b, size_t n, off_t o), (fd, b, n, o))
ON_FD(pread64, "read", ssize_t, 1, (int fd, void *b, size_t n, off_t o), (fd, b, n, o))
ON_FD(write, "write", ssize_t, 0, (int fd, const void *b, size_t n), (fd, b, n))
ON_FD(writev, "write", ssize_t, 0, (int fd, const struct iovec *v, int n), (fd, v, n))
ON_FD(pwrite, "write", ssize_t, 0, (int fd, const void *b, size_t n, off_t o), (fd, b, n, o))
ON_FD(pwrite64, "write", ssize_t, 0, (int fd, const void *b, size_t n, off_t o), (fd, b, n, o))
ON_FD(fsync, "fsync", int, 0, (int fd), (fd))
ON_FD(fdatasync, "fsync", int, 0, (int fd), (fd))
ON_FD(ftruncate, "truncate", int, 0, (int fd, off_t n), (fd, n))
ON_FD(ftruncate64, "truncate", int, 0, (int fd, off_t n), (fd, n))

int close(int fd) {
    REAL("close", int, int);
    mark(fd, NULL);
    return real(fd);
}
int rename(const char *from, const char *to) {
    REAL("rename", int, const char *, const char *);
    if (!below(to)) return real(from, to);
    ACT(0, "rename", to, int, real(from, to))
}
int link(const char *from, const char *to) {
    REAL("link", int, const char *, const char *);
    if (!below(to)) return real(from, to);
    ACT(0, "link", to, int, real(from, to))
}
int linkat(int a, const char *from, int b, const char *to, int flags) {
    REAL("linkat", int, int, const char *, int, const char *, int);
    if (!below(to)) return real(a, from, b, to, flags);
    ACT(0, "link", to, int, real(a, from, b, to, flags))
}
int unlink(const char *path) {
    REAL("unlink", int, const char *);
    if (!below(path)) return real(path);
    ACT(0, "unlink", path, int, real(path))
}
int mkdir(const char *path, mode_t m) {
    REAL("mkdir", int, const char *, mode_t);
    if (!below(path)) return real(path, m);
    ACT(0, "mkdir", path, int, real(path, m))
}
DIR *opendir(const char *path) {
    REAL("opendir", DIR *, const char *);
    if (below(path)) {
        int how = due(1, "list", path);
        if (how == ERROR || how == FULL) { errno = EIO; return NULL; }
        DIR *got = real(path);
        if (how == KILL_AFTER) kill(getpid(), SIGKILL);
        if (how == LOST) { if (got) closedir(got); errno = EIO; return NULL; }
        return got;
    }
    return real(path);
}
