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

#define SPIN (1e-6 * SPIN_MICROSECONDS)
#define LOOK 0.05 /* seconds between looks at whether the others live: a death is seen within this */

void cores_note(group_t *g) {
    cpu_set_t *mine = &g->ctl[g->rank].cores;
    if (sched_getaffinity(0, sizeof *mine, mine)) memset(mine, 0xff, sizeof *mine); /* more cores than a set holds */
}

/* Whether each rank can have a core of its own. Launchers may bind ranks to cores: of those that may run on some cores
 * alone there must not be more than cores. Notes a core's share of them. */
int cores_suffice(group_t *g) {
    cpu_set_t all, both;
    int enough = 1;
    CPU_ZERO(&all);
    for (int r = 0; r < g->size; r++) {
        const cpu_set_t *some = &g->ctl[r].cores;
        int bound = 0;
        for (int other = 0; other < g->size; other++) {
            CPU_AND(&both, some, &g->ctl[other].cores);
            bound += CPU_EQUAL(&both, &g->ctl[other].cores) != 0;
        }
        enough &= bound <= CPU_COUNT(some);
        CPU_OR(&all, &all, some);
    }
    int cores = CPU_COUNT(&all);
    g->share = (g->size + cores - 1) / cores;
    return enough && g->size <= cores;
}

/* By the fastest of some trials: in one the core may have been somebody else's for a while, and a rank that thinks that
 * it spins for long, and does not, sleeps at every other small collective. */
int spins_of_a_wait(void) {
    double fastest = 1;
    for (int trial = 0; trial < 20; trial++) {
        double began = now();
        for (int i = 0; i < 100; i++) pause_cpu();
        double took = now() - began;
        if (took > 0 && took < fastest) fastest = took;
    }
    return (int)(SPIN / fastest * 100) + 1;
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
    if (g->tiny) return g->ctl[rank].words[round % SAID].tiny;
    return g->slots + (g->depth * (size_t)rank + round % g->depth) * g->slot;
}

desc_t *desc_of(const group_t *g, int rank, uint32_t round) { return &g->ctl[rank].words[round % SAID].desc; }

int round_reached(const group_t *g, int rank, uint32_t round) {
    return (int32_t)(atomic_load_explicit(&g->ctl[rank].round, memory_order_acquire) - round) >= 0;
}

/* Whether a rank that sleeps on our rounds has what it sleeps for: waking it for each would cost a switch a round. */
static int wanted(const group_t *g) {
    for (int r = 0; r < g->size; r++) {
        const ctl_t *other = &g->ctl[r];
        if (atomic_load(&other->awaited) == (uint32_t)g->rank + 1 && (int32_t)(g->round - atomic_load(&other->target)) >= 0)
            return 1;
    }
    return 0;
}

/* Announces all rounds until this one, for the last of which our slot and descriptor are filled. */
void round_publish_until(group_t *g, uint32_t round) {
    ctl_t *me = &g->ctl[g->rank];
    atomic_exchange(&me->round, g->round = round); /* a full barrier: the sleepers' count is read after it */
    if (atomic_load(&me->sleepers) && wanted(g)) futex_wake_all(&me->round);
}

int round_arrived(const group_t *g, uint32_t round) {
    for (int r = 0; r < g->size; r++)
        if (!round_reached(g, r, round)) return 0;
    return 1;
}

int round_fail(group_t *g, int rank, int status) {
    if (g->work) {
        g->work->culprit = rank;
        uint32_t at = atomic_load(&g->ctl[rank].round);
        g->work->theirs = *desc_of(g, rank, at);
        if (at == 0) memset(&g->work->theirs, 0, sizeof g->work->theirs);
    }
    g->fail_status = status, g->fail_culprit = rank;
    if (g->work) g->fail_theirs = g->work->theirs;
    g->broken = 1;
    atomic_store(&g->ctl[g->rank].failed, 1);
    for (int r = 0; r < g->size; r++) futex_wake_all(&g->ctl[r].round);
    return status;
}

/* This rank cannot go on: the others learn why as soon as they wait for it. The first reason stays. */
void round_abort(group_t *g, const char *reason, size_t length) {
    ctl_t *me = &g->ctl[g->rank];
    if (g->broken) return;
    memcpy(me->reason, reason, length < REASON ? length : REASON - 1);
    g->fail_status = E_ABORTED, g->fail_culprit = g->rank;
    memset(&g->fail_theirs, 0, sizeof g->fail_theirs);
    g->broken = 1;
    atomic_store(&me->failed, 1);
    for (int r = 0; r < g->size; r++) futex_wake_all(&g->ctl[r].round);
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
int round_broken(const group_t *g, work_t *work) {
    work->culprit = g->fail_culprit, work->theirs = g->fail_theirs;
    return g->fail_status ? g->fail_status : E_ABORTED;
}

/* A rank will not come. Names one that said why, else the one that died at its work, before one that left, and perhaps
 * ended, because of it. */
static int blame(group_t *g, int rank) {
    for (int r = 0; r < g->size; r++)
        if (r != g->rank && atomic_load(&g->ctl[r].failed) && g->ctl[r].reason[0]) return round_fail(g, r, E_ABORTED);
    for (int r = 0; r < g->size; r++)
        if (r != g->rank && !atomic_load(&g->ctl[r].failed) && !rank_alive(g, r)) return round_fail(g, r, E_DIED);
    return round_fail(g, rank, rank_alive(g, rank) ? E_ABORTED : E_DIED);
}

/* At the start of a collective: a rank that has left will not come, even if it had come to this one before. */
int round_gone(group_t *g) {
    int gone = round_left(g);
    return gone < 0 ? OK : blame(g, gone);
}

/* A rank that has left the group, or -1. */
int round_left(const group_t *g) {
    for (int r = 0; r < g->size; r++)
        if (r != g->rank && atomic_load_explicit(&g->ctl[r].failed, memory_order_acquire)) return r;
    return -1;
}

static int sleep_until(group_t *g, int rank, uint32_t round) {
    ctl_t *other = &g->ctl[rank], *me = &g->ctl[g->rank];
    int status = OK;
    atomic_store(&me->target, round);
    atomic_store(&me->awaited, (uint32_t)rank + 1);
    atomic_fetch_add(&other->sleepers, 1);
    while (!round_reached(g, rank, round)) {
        uint32_t seen = atomic_load(&other->round);
        if ((int32_t)(seen - round) < 0) futex_wait_for(&other->round, seen, LOOK);
        if (round_reached(g, rank, round)) break;
        for (int r = 0; r < g->size && !status; r++) { /* a death elsewhere holds us up just as well */
            if (r == g->rank || round_reached(g, r, round)) continue;
            int gone = !rank_alive(g, r) || atomic_load(&g->ctl[r].failed);
            if (gone && !round_reached(g, r, round)) status = blame(g, r);
        }
        if (g->deadline < 0) g->deadline = now() + g->work->timeout;
        if (!status && (g->stop || now() > g->deadline)) status = round_fail(g, rank, g->stop ? E_ABORTED : E_TIMEOUT);
        if (status) break;
    }
    atomic_fetch_sub(&other->sleepers, 1);
    atomic_store(&me->awaited, 0);
    return status;
}

static uint32_t core_noted(group_t *g) {
    uint32_t here = (uint32_t)sched_getcpu() + 1;
    atomic_store_explicit(&g->ctl[g->rank].cpu, here, memory_order_relaxed);
    return here;
}

/* Off this core, unless we did so lately, or may run on no other. */
static int step_aside(group_t *g, uint32_t here) {
    cpu_set_t allowed, others;
    if (now() - g->moved < 0.002 || sched_getaffinity(0, sizeof allowed, &allowed)) return 0;
    g->moved = now();
    others = allowed;
    CPU_CLR((int)here - 1, &others);
    if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others)) return 0;
    sched_setaffinity(0, sizeof allowed, &allowed);
    return 1;
}

/* Two ranks on one core take turns at 100 us a round, and the scheduler may leave them there while another core is
 * free. The higher rank then steps aside: off this core for a moment, with its affinity as before afterwards. Says
 * whether the two are apart. */
#define PARTED 2
static int part_from(group_t *g, int rank) {
    uint32_t here = core_noted(g);
    int apart = atomic_load(&g->ctl[rank].cpu) != here;
    if (apart || g->limit < g->spins || !g->spins || g->rank < rank) return apart;
    return step_aside(g, here) ? PARTED : 0;
}

/* With more ranks than cores: one core may have three of four for a tenth of a second, 13 us a small all-to-all, 9 with two
 * on each. The highest of those above a core's share steps aside. Not in large collectives, where ranks note their cores
 * too seldom for that, and a move costs what is in the caches. */
static void spread(group_t *g) {
    if (g->work->d.bytes >= SMALL_JOB) return;
    uint32_t here = core_noted(g);
    int alike = 0;
    for (int r = 0; r < g->size; r++) {
        if (atomic_load_explicit(&g->ctl[r].cpu, memory_order_relaxed) != here) continue;
        if (r > g->rank) return;
        alike++;
    }
    if (alike > g->share) step_aside(g, here);
}

static void spin(const group_t *g, int rank, uint32_t round, int left) {
    while (!round_reached(g, rank, round) && left-- > 0) pause_cpu();
}

/* Spins; then sleeps, until `last`. If the other came soon after we gave up, on a core of its own, we spin longer the
 * next time; if not, less: it is not running, and our spin may be what keeps it from it. */
static int wait_long(group_t *g, int rank, uint32_t round, uint32_t last) {
    int limit = g->limit;
    spin(g, rank, round, g->budget < limit ? g->budget : limit);
    if (!round_reached(g, rank, round)) {
        double began = now();
        int apart = part_from(g, rank);
        if (apart == PARTED) spin(g, rank, round, limit); /* asleep we would be woken on the other's core again */
        if (g->yielding) spread(g);
        while (g->yielding && !round_reached(g, rank, round) && now() - began < YIELD) sched_yield();
        int status = round_reached(g, rank, round) ? OK : sleep_until(g, rank, last);
        if (status) return status;
        if (!apart || now() - began > 2 * SPIN) {
            if (g->budget > 64) g->budget /= 2;
            return OK;
        }
    }
    if (g->budget < limit) g->budget = 2 * g->budget < limit ? 2 * g->budget : limit;
    return OK;
}

/* Waits until a rank has published `round`. If it must sleep, it sleeps until `last`, a later round that the others reach
 * without us, so as to take several at once. */
int round_wait_for(group_t *g, int rank, uint32_t round, uint32_t last) {
    return round_reached(g, rank, round) ? OK : wait_long(g, rank, round, last);
}

/* The same for every rank. */
int round_wait(group_t *g, uint32_t round, uint32_t last) {
    int status = OK;
    for (int step = 1; step < g->size && !status; step++) {
        int rank = (g->rank + step) % g->size;
        status = round_wait_for(g, rank, round, last);
    }
    return status;
}
