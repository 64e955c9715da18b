/* Whether ranks do the same: what they say of a collective is compared, at once or a little later.
 *
 * Where every rank can have a core, all wait for all in each collective and compare there. With more ranks than cores
 * such a meeting costs each core two changes of processes. So in a small collective with a root a rank then waits for
 * those alone whose bytes it needs: a broadcast's root for nobody, the others for the root. The rounds that it goes on
 * from, at most half of what descriptions there is room for, it compares as soon as it meets the others, or when the
 * group ends. All ranks compare all rounds in their order, so all find the same disagreement. */
#include <string.h>

#include "shm.h"

/* Whom this rank waits for in the first round of a collective: EVERYBODY, NOBODY, or a rank. */
int awaited(const group_t *g, const work_t *j, const algorithm_t *a) {
    int root = (int)j->d.root;
    if (a->flow == AMONG_ALL || g->spins || g->meeting) return EVERYBODY;
    if (j->d.bytes >= SMALL_JOB || root >= g->size || a->rounds(g, j) != 1) return EVERYBODY;
    if (a->flow == TO_ROOT) return g->rank == root ? EVERYBODY : NOBODY;
    return g->rank == root ? NOBODY : root;
}

static int alike(const group_t *g, int rank, uint32_t round) {
    return !memcmp(desc_of(g, g->rank, round), desc_of(g, rank, round), DESC_COMPARED);
}

/* Compares all rounds until one that every rank has published. */
int round_compare(group_t *g, work_t *work, uint32_t until) {
    for (; g->compared != until; g->compared++) {
        uint32_t round = g->compared + 1;
        if (g->passed) {
            g->passed--;
            continue;
        }
        for (int r = 0; r < g->size; r++) {
            if (alike(g, r, round)) continue;
            work->ours = *desc_of(g, g->rank, round), work->theirs = *desc_of(g, r, round), work->culprit = r;
            work->late = work->ours.seq != work->d.seq;
            g->reading = round;
            return E_MISMATCH;
        }
    }
    return OK;
}

/* Ranks that disagree go on from the furthest round that any of them may have published, past those between. */
static void pass_over(group_t *g) {
    uint32_t far = g->reading + SAID / 2;
    *desc_of(g, g->rank, far) = *desc_of(g, g->rank, g->reading); /* where we stand, for others' errors */
    round_publish_until(g, far);
    g->compared = g->reading, g->passed = SAID / 2;
    g->reading = g->round;
}

/* Of a collective that has failed: all ranks see a mismatch alike, and are ready for the next one. */
int disagree(group_t *g, int status) {
    if (status == E_MISMATCH) pass_over(g);
    return status;
}

/* Whether those that `from` stands for have published the round. */
int round_there(const group_t *g, int from, uint32_t round) {
    if (from == NOBODY) return 1;
    return from == EVERYBODY ? round_arrived(g, round) : round_reached(g, from, round);
}

/* Waits for those in the round that is being read, and compares. One rank alone whose word is another's: all are asked,
 * since they may have disagreed before. */
int round_meet(group_t *g, work_t *work, int from) {
    uint32_t round = g->reading, last = round + (g->round - round) / 2;
    if (from == NOBODY) return OK;
    if (from != EVERYBODY) {
        int status = round_wait_for(g, from, round, last);
        if (status || alike(g, from, round)) return status;
    }
    int status = round_wait(g, round, last);
    return status ? status : round_compare(g, work, round);
}

/* The same if nothing has to be waited for. 0: something has, or ranks disagree. */
int round_met(group_t *g, work_t *work, int from) {
    if (!round_there(g, from, g->reading)) return 0;
    return from == NOBODY || (from == EVERYBODY ? !round_compare(g, work, g->reading) : alike(g, from, g->reading));
}

/* Compares what has come since of the rounds that this rank went on from, and waits until at most `most` are left. */
int round_settle(group_t *g, work_t *work, uint32_t most) {
    int status = OK;
    while (!status && g->compared != g->round) {
        uint32_t next = g->compared + 1;
        if (!round_arrived(g, next)) {
            if (g->round - g->compared <= most) break;
            status = round_wait(g, next, next + (g->round - next) / 2);
        }
        if (!status) status = round_compare(g, work, next);
    }
    return disagree(g, status);
}
