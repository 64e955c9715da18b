/* Memory that other ranks can map. Files have no name: a rank opens another's through /proc/PID/fd, which the
 * kernel allows the same user alone, and the last rank to end takes the memory with it, killed or not. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "shm.h"

#define FILL ((size_t)1 << 20)

typedef struct {
    const char *base;
    size_t length;
    uint32_t pid, id; /* pid 0: our own */
    int fd;
} mapping_t;

static mapping_t *mappings;
static size_t used, room;
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;

/* A ring is about 1 MB, of three to eight ranks 2 MB (4 ranks, broadcast of 1 MB: 118 us with 1 MB, 88 with 2). Of more
 * than two ranks with large chunks: a rank's part of one is then long enough for the prefetcher, and ranks that share a
 * core change places less often (4 ranks on 2 cores, all-reduce of 64 MB: 33 ms with 128 KB, 43 with 32). Many ranks have
 * shorter rings: the memory adds up. */
size_t ring_chunk(int size) { return size <= 2 ? 32 << 10 : size <= 16 ? 128 << 10 : size <= 64 ? 64 << 10 : 32 << 10; }
uint32_t ring_depth(int size) { return size <= 2 ? DEPTH : size <= 8 ? 16 : 8; }
/* Behind the chunk is room for the reduced part of an earlier one, or for tables. */
size_t ring_slot(int size) { return ring_chunk(size) + ring_chunk(size) / 2; }

size_t group_bytes(int size) {
    return LINE + (size_t)size * sizeof(ctl_t) + ring_depth(size) * (size_t)size * ring_slot(size) + p2p_bytes(size);
}

/* Gives a part of a file its memory now, since later the want of it would be a SIGBUS. In pieces: a signal undoes what the
 * kernel has been at, and a profiler sends many. 0, or what errno would be. */
int segment_fill(int fd, size_t at, size_t length) {
    int status = 0;
    struct statvfs room;
    if (!fstatvfs(fd, &room) && room.f_blocks && length / room.f_frsize > room.f_bavail) return ENOSPC;
    for (size_t done = 0; done < length && !status; done += FILL) {
        size_t n = length - done < FILL ? length - done : FILL;
        do status = posix_fallocate(fd, (off_t)(at + done), (off_t)n);
        while (status == EINTR);
    }
    return status;
}

void segments_unlock(void) { pthread_mutex_init(&guard, NULL); }

static int remember(mapping_t m) {
    if (used == room) {
        size_t more = room ? 2 * room : 16;
        mapping_t *grown = realloc(mappings, more * sizeof *grown);
        if (!grown) return E_MEMORY;
        mappings = grown, room = more;
    }
    mappings[used++] = m;
    return OK;
}

/* Makes our own segment known: `segment_describe` finds tensors in it. */
int segment_register(const char *base, size_t length, uint32_t id, int fd) {
    pthread_mutex_lock(&guard);
    int status = remember((mapping_t){base, length, 0, id, fd});
    pthread_mutex_unlock(&guard);
    return status;
}

void segment_forget(uint32_t id) {
    pthread_mutex_lock(&guard);
    for (size_t i = 0; i < used; i++)
        if (!mappings[i].pid && mappings[i].id == id) {
            mappings[i] = mappings[--used];
            break;
        }
    pthread_mutex_unlock(&guard);
}

/* Fills in where [at, at + length) lies; segment 0 when it is private memory. */
void segment_describe(const void *at, size_t length, desc_t *d) {
    d->segment = 0;
    const char *p = at;
    pthread_mutex_lock(&guard);
    for (size_t i = 0; i < used; i++) {
        const mapping_t *m = &mappings[i];
        if (!m->pid && p >= m->base && p + length <= m->base + m->length) {
            d->segment = m->id, d->fd = (uint32_t)m->fd;
            d->offset = (uint64_t)(p - m->base), d->length = m->length;
            break;
        }
    }
    pthread_mutex_unlock(&guard);
}

/* The memory that another process described, mapped here once and kept. NULL when it cannot be mapped. */
const char *segment_map(uint32_t pid, const desc_t *d) {
    const char *found = NULL;
    pthread_mutex_lock(&guard);
    for (size_t i = 0; i < used && !found; i++)
        if (mappings[i].pid == pid && mappings[i].id == d->segment) found = mappings[i].base;
    if (!found) {
        char path[64];
        snprintf(path, sizeof path, "/proc/%u/fd/%u", pid, d->fd);
        int fd = open(path, O_RDWR | O_CLOEXEC);
        void *at = fd < 0 ? MAP_FAILED
                          : mmap(NULL, d->length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
        if (fd >= 0) close(fd);
        if (at != MAP_FAILED && remember((mapping_t){at, d->length, pid, d->segment, -1}) == OK) found = at;
    }
    pthread_mutex_unlock(&guard);
    return found ? found + d->offset : NULL;
}
