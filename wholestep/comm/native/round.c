/* Rounds: publish, wait, and what to do when a rank does not come. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "shm.h"

#define LOOK 0.05 /* seconds between looks at whether the others live: a death is seen within this */

static inline void pause_cpu(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void futex_wake_all(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, 1 << 30, NULL, NULL, 0); }

int futex_wait_for(_Atomic uint32_t *word, uint32_t seen, double seconds) {
    if (seconds < 0) seconds = 0;
    struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    return (int)syscall(SYS_futex, word, FUTEX_WAIT, seen, &t, NULL, 0);
}

/* A rank holds a record lock on its byte of the segment; the kernel drops it when the process ends, however it
 * ends, and also while it is a zombie. */
int rank_alive(const group_t *g, int rank) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
    return fcntl(g->fd, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

char *slot_of(const group_t *g, int rank, uint32_t round) {
    return g->slots + (DEPTH * (size_t)rank + round % DEPTH) * SLOT;
}

desc_t *desc_of(const group_t *g, int rank, uint32_t round) { return &g->ctl[rank].desc[round % DEPTH]; }

static int reached(const group_t *g, int rank, uint32_t round) {
    return (int32_t)(atomic_load_explicit(&g->ctl[rank].round, memory_order_acquire) - round) >= 0;
}

/* Announces the round that our slot and descriptor are filled for. */
void round_publish(group_t *g) {
    ctl_t *me = &g->ctl[g->rank];
    atomic_exchange(&me->round, ++g->round); /* a full barrier: the sleepers' count is read after it */
    if (atomic_load(&me->sleepers)) futex_wake_all(&me->round);
}

int round_arrived(const group_t *g, uint32_t round) {
    for (int r = 0; r < g->size; r++)
        if (!reached(g, r, round)) return 0;
    return 1;
}

int round_fail(group_t *g, int rank, int status) {
    if (g->job) {
        g->job->culprit = rank;
        uint32_t at = atomic_load(&g->ctl[rank].round);
        g->job->theirs = *desc_of(g, rank, at);
        if (at == 0) memset(&g->job->theirs, 0, sizeof g->job->theirs);
    }
    g->fail_status = status, g->fail_culprit = rank;
    if (g->job) g->fail_theirs = g->job->theirs;
    g->broken = 1;
    atomic_store(&g->ctl[g->rank].failed, 1);
    for (int r = 0; r < g->size; r++) futex_wake_all(&g->ctl[r].round);
    return status;
}

/* A rank's memory cannot be read: is it dying? Its memory goes a moment before its lock. */
int round_unreadable(group_t *g, int rank) {
    struct timespec pause = {0, 10 * 1000 * 1000};
    for (int turn = 0; turn < 30; turn++) {
        if (!rank_alive(g, rank)) return round_fail(g, rank, E_DIED);
        nanosleep(&pause, NULL);
    }
    return round_fail(g, rank, E_MEMORY);
}

/* What a call on a broken group gets: what broke it. */
int round_broken(const group_t *g, job_t *job) {
    job->culprit = g->fail_culprit, job->theirs = g->fail_theirs;
    return g->fail_status ? g->fail_status : E_ABORTED;
}

/* A rank will not come. Names the rank that died at its work before one that left, and perhaps ended, because of it. */
static int blame(group_t *g, int rank) {
    for (int r = 0; r < g->size; r++)
        if (r != g->rank && !atomic_load(&g->ctl[r].failed) && !rank_alive(g, r)) return round_fail(g, r, E_DIED);
    return round_fail(g, rank, rank_alive(g, rank) ? E_ABORTED : E_DIED);
}

static int sleep_until(group_t *g, int rank, uint32_t round) {
    ctl_t *other = &g->ctl[rank];
    while (!reached(g, rank, round)) {
        atomic_fetch_add(&other->sleepers, 1);
        uint32_t seen = atomic_load(&other->round);
        if ((int32_t)(seen - round) < 0) futex_wait_for(&other->round, seen, LOOK);
        atomic_fetch_sub(&other->sleepers, 1);
        if (reached(g, rank, round)) break;
        for (int r = 0; r < g->size; r++) { /* a death elsewhere holds us up just as well */
            if (r == g->rank || reached(g, r, round)) continue;
            int gone = !rank_alive(g, r) || atomic_load(&g->ctl[r].failed);
            if (gone && !reached(g, r, round)) return blame(g, r);
        }
        if (now() > g->deadline) return round_fail(g, rank, E_TIMEOUT);
    }
    return OK;
}

/* Two ranks on one core take turns at 100 us a round, and the scheduler may leave them there while another core is
 * free. The higher rank then steps aside: off this core for a moment, with its affinity as before afterwards. */
static void part_from(group_t *g, int rank) {
    uint32_t here = (uint32_t)sched_getcpu() + 1;
    atomic_store(&g->ctl[g->rank].cpu, here);
    if (g->limit < g->spins || !g->spins || g->rank < rank || atomic_load(&g->ctl[rank].cpu) != here || now() - g->moved < 0.01) return;
    cpu_set_t allowed, others;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
    others = allowed;
    CPU_CLR((int)here - 1, &others);
    if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others)) return;
    sched_setaffinity(0, sizeof allowed, &allowed);
    g->moved = now();
}

/* Waits until every rank has published `round`: spins, then sleeps. */
int round_wait(group_t *g, uint32_t round) {
    for (int step = 1; step < g->size; step++) {
        int rank = (g->rank + step) % g->size;
        if (reached(g, rank, round)) continue;
        int left = g->budget < g->limit ? g->budget : g->limit;
        while (!reached(g, rank, round) && left-- > 0) pause_cpu();
        if (reached(g, rank, round)) { /* spinning pays: try as long as allowed again */
            if (g->budget < g->limit) g->budget = 2 * g->budget < g->limit ? 2 * g->budget : g->limit;
            continue;
        }
        if (g->budget > 64) g->budget /= 2; /* the other is not running: our spin may be what keeps it from it */
        part_from(g, rank);
        for (left = g->yields; left > 0 && !reached(g, rank, round); left--) sched_yield();
        int status = sleep_until(g, rank, round);
        if (status) return status;
    }
    return OK;
}

/* Compares what all ranks say they do, after the first round of a collective; all see the same, so all agree. */
int round_compare(group_t *g, job_t *job) {
    const desc_t *mine = desc_of(g, g->rank, g->reading);
    for (int r = 0; r < g->size; r++) {
        const desc_t *other = desc_of(g, r, g->reading);
        if (memcmp(mine, other, DESC_COMPARED)) {
            job->theirs = *other, job->culprit = r;
            return E_MISMATCH;
        }
    }
    return OK;
}
