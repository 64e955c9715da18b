/* Works and their order. Collectives of a group run one after the other, as called:
 *
 * - a synchronous one with nothing before it runs in the calling thread;
 * - an asynchronous one of a single round is published at once and read when it is waited for: no thread;
 * - any other asynchronous one goes to the group's thread, as does all that is called while that is busy. */
#include "shm.h"

static void complete(group_t *g, work_t *j, int status) {
    j->status = status;
    atomic_store(&j->done, 1); /* from here on the waiter may free the work: its address serves to wake, no more */
    if (atomic_load(&g->waiters)) futex_wake_all(&j->done);
}

/* Reads the result of the collective that was only published so far. Call with the group to oneself. */
static void finish_lazy(group_t *g) {
    work_t *j = g->lazy;
    if (!j) return;
    g->lazy = NULL;
    if (g->broken) { complete(g, j, round_broken(g, j)); return; }
    work_enter(g, j);
    g->reading--; /* published, not yet read */
    complete(g, j, work_end_round(g, j, choose(g, j), 0, 0));
}

static void *serve(void *arg) {
    group_t *g = arg;
    pthread_mutex_lock(&g->lock);
    for (;;) {
        while (!g->stop && (g->busy || !g->head)) pthread_cond_wait(&g->wake, &g->lock);
        if (g->stop) break;
        work_t *j = g->head;
        g->head = j->next;
        if (!g->head) g->tail = NULL;
        g->busy = 1;
        pthread_mutex_unlock(&g->lock);
        work_patience(g, 1);
        finish_lazy(g);
        complete(g, j, work_run(g, j));
        pthread_mutex_lock(&g->lock);
        g->busy = 0;
        pthread_cond_broadcast(&g->wake);
    }
    pthread_mutex_unlock(&g->lock);
    return NULL;
}

static void release(group_t *g) {
    pthread_mutex_lock(&g->lock);
    g->busy = 0;
    pthread_cond_broadcast(&g->wake);
    pthread_mutex_unlock(&g->lock);
}

#define DASH (16 * 1024)          /* bytes at most */

/* A small collective of one round with nothing before it, in two steps for a caller that would rather not hand over the
 * GIL. work_try publishes it: 0 if it is not such a one. work_try_end waits for a microsecond: 0 if the others were not
 * there or something is wrong, and then work_resume, called without the GIL, ends it. Between the first step and the end
 * the group is locked. */
int work_try(group_t *g, work_t *j) {
    if (j->d.bytes > DASH || pthread_mutex_trylock(&g->lock)) return 0;
    const algorithm_t *a = choose(g, j);
    int free = !g->busy && !g->head && !g->lazy && !g->broken && a->rounds(g, j) == 1 && round_left(g) < 0;
    if (free) work_enter(g, j);
    if (!free || work_full(g)) {
        pthread_mutex_unlock(&g->lock);
        return 0;
    }
    work_patience(g, 0);
    work_start_round(g, j, a, 0);
    return 1;
}

int work_try_end(group_t *g, work_t *j) {
    const algorithm_t *a = choose(g, j);
    int from = awaited(g, j, a);
    for (int left = 1 + g->spins / SPIN_MICROSECONDS; left > 0 && !round_there(g, from, g->round); left--) pause_cpu();
    g->reading = g->round;
    if (round_met(g, j, from) && !work_take_round(g, j, a, 0) && a->rounds(g, j) == 1) {
        pthread_mutex_unlock(&g->lock);
        return 1;
    }
    g->reading = g->round - 1; /* all_to_all, too, may read its first round again */
    g->busy = 1;
    pthread_mutex_unlock(&g->lock);
    return 0;
}

int work_resume(group_t *g, work_t *j) {
    int status = work_run_rounds(g, j, choose(g, j), 0, 1, 0);
    complete(g, j, status);
    release(g);
    return status;
}

/* Runs or queues a work. Returns its status when it has ended, -1 when it is under way. */
int work_submit(group_t *g, work_t *j, int async) {
    pthread_mutex_lock(&g->lock);
    if (!g->busy && !g->head) {
        int single = async && work_single(g, j);
        if (!async || single) {
            g->busy = 1;
            pthread_mutex_unlock(&g->lock);
            work_patience(g, 0);
            finish_lazy(g);
            int status = single ? work_ready(g, j) : work_run(g, j);
            if (single && !status) status = -1, work_start_round(g, j, choose(g, j), 0), g->lazy = j;
            else complete(g, j, status);
            release(g);
            return status;
        }
    }
    if (!g->has_thread) {
        if (pthread_create(&g->thread, NULL, serve, g)) {
            pthread_mutex_unlock(&g->lock);
            complete(g, j, E_MEMORY);
            return E_MEMORY;
        }
        g->has_thread = 1;
    }
    j->next = NULL;
    if (g->tail) g->tail->next = j; else g->head = j;
    g->tail = j;
    pthread_cond_broadcast(&g->wake);
    pthread_mutex_unlock(&g->lock);
    return async ? -1 : work_finish(g, j, -1);
}

static int take_lazy(group_t *g, work_t *j, int wait) {
    pthread_mutex_lock(&g->lock);
    while (wait && g->busy && g->lazy == j) pthread_cond_wait(&g->wake, &g->lock);
    int there = g->lazy == j && (wait || g->broken || round_there(g, awaited(g, j, choose(g, j)), g->round));
    int take = there && !g->busy;
    if (take) g->busy = 1;
    pthread_mutex_unlock(&g->lock);
    if (take) work_patience(g, 0), finish_lazy(g), release(g);
    return take;
}

/* Waits for a work; negative seconds: until its own time-out. Returns its status, or -1 when `seconds` ran out. */
int work_finish(group_t *g, work_t *j, double seconds) {
    double end = now() + seconds;
    if (!atomic_load(&j->done)) take_lazy(g, j, 1);
    for (int left = g->spins; left > 0 && !atomic_load_explicit(&j->done, memory_order_acquire); left--)
        ;
    while (!atomic_load(&j->done)) {
        double left = seconds < 0 ? 1.0 : end - now();
        if (left <= 0) return -1;
        atomic_fetch_add(&g->waiters, 1);
        futex_wait_for(&j->done, 0, left);
        atomic_fetch_sub(&g->waiters, 1);
    }
    return j->status;
}

int work_test(group_t *g, work_t *j) {
    if (!atomic_load(&j->done)) take_lazy(g, j, 0);
    return (int)atomic_load(&j->done);
}

/* Before this rank leaves: waits until the others have come to the rounds that it went on from. */
int group_settle(group_t *g, work_t *j) {
    pthread_mutex_lock(&g->lock);
    int idle = !g->busy && !g->head && !g->lazy && !g->broken && g->round - g->compared > g->passed;
    if (idle) g->busy = 1;
    pthread_mutex_unlock(&g->lock);
    if (!idle) return OK;
    j->d = *desc_of(g, g->rank, g->round);
    work_patience(g, 0);
    work_enter(g, j);
    int status = round_settle(g, j, 0);
    release(g);
    return status;
}

#define LINGER 10 /* seconds */

/* Ends the threads. A work that one is in the middle of fails at once, as if this rank had left. 0: a thread of the caller's
 * has not come out. */
int group_stop(group_t *g) {
    p2p_stop(g);
    pthread_mutex_lock(&g->lock);
    g->stop = 1;
    pthread_cond_broadcast(&g->wake);
    pthread_mutex_unlock(&g->lock);
    if (g->has_thread) pthread_join(g->thread, NULL);
    for (work_t *j = g->head; j; j = j->next) complete(g, j, E_ABORTED);
    if (g->lazy) complete(g, g->lazy, E_ABORTED);
    g->head = g->lazy = NULL;
    atomic_store(&g->ctl[g->rank].failed, 1);
    futex_wake_all(&g->ctl[g->rank].round);
    for (double began = now(); atomic_load(&g->inside) && now() - began < LINGER; sched_yield())
        ;
    return !atomic_load(&g->inside);
}
