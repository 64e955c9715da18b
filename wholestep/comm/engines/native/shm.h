/* The shared-memory engine: ranks that are processes of one host.
 *
 * A group is one segment: a control block per rank, then a ring of data slots per rank. Everything is built from one
 * step, the *round*: a rank fills a slot, publishes its round number, waits until every rank has published that
 * round, and reads the others' slots. A rank may fill up to `ahead` rounds before it reads the first of them, and
 * never more: so whoever has published round r has read round r - ahead, and a slot that was seen published `ahead`
 * rounds ago can be filled again. One counter a rank is all the synchronisation. Running ahead costs nothing when
 * all ranks run, and on a busy machine lets one get on while another waits for its core. A few bytes travel beside
 * the description of their collective, of which there is a longer ring.
 *
 * round.c    flags, waiting, dead ranks        compare.c   whether all do the same
 * reduce.c   vector kernels
 * move.c     gather, scatter, broadcast …      allreduce_*.c   one algorithm each
 * work.c      one work, its rounds
 * p2p.c, p2p_wait.c   send and receive         progress.c  works, their order, the progress thread
 * segment.c  memory                            slots.c     copies in and out of slots
 * module.c   the Python names                 cached_call.c, plans.c, flight.c   calls like an earlier one
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* cpu_set_t */
#endif
#ifndef WHOLESTEP_SHM_H
#define WHOLESTEP_SHM_H

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define MAX_RANKS 256
/* A ring of as many slots, half of which a rank may fill before it reads the first round. It is as large as a core's
 * second-level cache, 1 MB, so that what others read has left that for the third level: three times as fast as out of
 * another core's own cache. All-reduce, 2 ranks, Zen 4, quiet machine, half the ring x chunk, 1 MB | 64 MB in GB/s:
 * 4 x 32 KB 7.5 | 7.3, 12 x 32 KB 17.4 | -, 16 x 32 KB 21.5 | 9.1, 24 x 32 KB 18.7 | -, 4 x 128 KB 21.6 | 9.6,
 * 4 x 256 KB 20.2 | 8.6. */
#define DEPTH 32
#define SAID 64                 /* rounds that a rank's descriptions are kept of; so far, by half, may it go on from others */
#define TINY 64                 /* bytes that travel beside the description, in place of a slot */
#define REASON 512              /* bytes, the last of which is 0 */
#define LINE 128                /* two cache lines: the prefetcher pairs them */
#define SMALL_JOB (8 * 1024)    /* bytes: from here on copies cost more than meetings, and are timed */
#define LARGE (16 << 20)        /* bytes of output that leave no room for anything else in the caches */
#define SPIN_MICROSECONDS 150   /* at most: to halt a core of a virtual machine and to wake it again takes 50 and more */
/* Seconds of handing the core over before a rank sleeps: a core whose ranks all sleep is halted, and long in waking. A rank
 * that gets its core back later than that shares it with others that compute, and waits better asleep. */
#define YIELD 100e-6

enum { OP_BARRIER, OP_ALL_REDUCE, OP_REDUCE, OP_BROADCAST, OP_ALL_GATHER, OP_REDUCE_SCATTER, OP_GATHER, OP_SCATTER,
       OP_ALL_TO_ALL, OP_COUNT, OP_SEND = OP_COUNT, OP_RECV };
enum { RED_SUM, RED_PRODUCT, RED_MIN, RED_MAX, RED_BAND, RED_BOR, RED_BXOR, RED_AVG,
       RED_MEAN /* floats: each times 1 / ranks, then summed */ };
enum { T_F32, T_F64, T_F16, T_BF16, T_U8, T_I8, T_I16, T_I32, T_I64, T_U16, T_U32, T_U64, T_COUNT };
enum { OK = 0, E_TIMEOUT = 1, E_DIED = 2, E_MISMATCH = 3, E_ABORTED = 4, E_MEMORY = 5 };

/* What a rank says of the collective it enters. The first 32 bytes must be alike on all ranks. */
typedef struct {
    uint8_t op, dtype, red, spare;
    uint32_t root;
    uint64_t bytes, shape, seq;
    uint32_t segment, fd; /* of the input when it lies in shared memory; segment 0: private */
    uint64_t offset, length;
    uint32_t put, streamed; /* bytes in the slot, and whether they went past the caches */
} desc_t;
typedef struct {
    desc_t desc;
    char tiny[TINY];
} word_t;
#define DESC_COMPARED 32

typedef struct {
    _Alignas(LINE) _Atomic uint32_t round;   /* published: the futex that others wait on */
    _Alignas(LINE) _Atomic uint32_t sleepers; /* ranks in futex_wait on `round` */
    _Atomic uint32_t pid, failed, cpu;        /* failed: this rank left the group; cpu: where it last had to wait */
    _Atomic uint32_t awaited, target;         /* a sleeper's: the rank and the round of it that it sleeps for */
    _Atomic uint64_t claimed; /* allreduce_exchange.c: a round, and the pieces of this rank's part that are claimed in it */
    _Atomic uint64_t streams_until; /* slots.c: until then it wants slots written past the caches; monotonic, ns */
    cpu_set_t cores;                          /* on which this rank may run */
    char reason[REASON];                      /* why this rank cannot go on; empty while it can */
    _Alignas(LINE) word_t words[SAID];       /* by round */
    _Alignas(LINE) _Atomic uint32_t bell;     /* p2p: rung when a ring that concerns this rank moves */
    _Atomic uint32_t bell_sleepers;
} ctl_t;

typedef struct work {
    desc_t d;
    const char *in;
    char *out;
    size_t in_stride, out_stride;                         /* from one rank's part to the next */
    uint64_t *ins, *outs, *in_sizes, *out_sizes;          /* or explicit addresses and sizes, one a rank */
    size_t elem;                                          /* bytes of an element */
    double timeout;                                       /* seconds */
    size_t rounds;
    int status, culprit;
    desc_t theirs;                                        /* on a mismatch or time-out: where the other stands */
    int late;                                             /* a mismatch of an earlier collective, ours: */
    desc_t ours;
    _Atomic uint32_t done;
    struct work *next;
} work_t;

typedef struct ring ring_t;

typedef struct {
    int rank, size, fd;
    char *base;
    size_t length;
    ctl_t *ctl;
    char *slots;
    char *rings;
    const char *peers[MAX_RANKS]; /* direct: every rank's input, mapped here */
    uint64_t seq;                 /* collectives started */
    uint32_t round, reading; /* published last; being read, or read last */
    uint32_t compared, passed; /* all ranks were seen to do the same until this round; then so many that are nobody's */
    uint32_t ahead, depth; /* rounds; of the ring of slots */
    int tiny;              /* this work's bytes are beside their descriptions */
    size_t chunk, slot;    /* bytes that a rank publishes a round; of a slot */
    int spins, limit, budget; /* at most; at most in this work; what has paid lately */
    int yielding;             /* in this work, before it sleeps */
    int meeting;              /* in every collective, also where that is slow */
    int share;                /* ranks for each core, at most, when they are spread evenly */
    size_t put;          /* bytes put into the slot of the round that is being filled */
    int streaming, slow, longer; /* slots.c: writing past the caches; slow spans in a row; in a work that has had a span */
    size_t filled, judged;   /* bytes written through the caches since the last round was read; of this span so far, */
    double filling, judging; /* and the seconds it took */
    size_t beside;           /* bytes copied in that time that were in no slot */
    int broken;
    int fail_status, fail_culprit; /* why the group is broken: every later call says the same */
    desc_t fail_theirs;
    _Atomic uint32_t waiters; /* threads asleep until some work is done */
    _Atomic uint32_t inside;  /* threads that are in the group without the GIL */
    double deadline, moved; /* moved: when we last left a core that we shared with another rank */
    work_t *work; /* running */
    /* progress.c */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    pthread_t thread;
    int has_thread, busy, stop;
    work_t *head, *tail, *lazy;
    struct message *active, *early; /* p2p.c */
    pthread_mutex_t p2p_lock;
    int p2p_thread, p2p_waiters, slow_cells;
    pthread_t p2p_id;
} group_t;

enum { AMONG_ALL, FROM_ROOT, TO_ROOT };  /* where the bytes of a collective go */
enum { EVERYBODY = -1, NOBODY = -2 };    /* whom a rank waits for, if it is not one rank */

/* One way to run a collective in rounds. `direct` replaces them when every rank's input is in shared memory. */
typedef struct {
    const char *name;
    size_t (*rounds)(const group_t *, const work_t *);
    size_t (*lead)(const group_t *, const work_t *); /* rounds to fill before the first is read; NULL: g->ahead */
    void (*write)(group_t *, work_t *, size_t k, char *slot);
    int (*read)(group_t *, work_t *, size_t k);
    void (*direct)(group_t *, work_t *);
    int flow;
} algorithm_t;

extern const algorithm_t barrier_rounds, allreduce_exchange, allreduce_split, broadcast_rounds, reduce_rounds,
    allgather_rounds, reduce_scatter_rounds, gather_rounds, scatter_rounds, alltoall_rounds;

/* segment.c */
uint32_t ring_depth(int size);
size_t ring_chunk(int size);
size_t ring_slot(int size);
size_t group_bytes(int size);
int segment_fill(int fd, size_t at, size_t length);
int segment_register(const char *base, size_t length, uint32_t id, int fd);
void segment_forget(uint32_t id);
void segments_unlock(void);
void segment_describe(const void *at, size_t length, desc_t *d);
const char *segment_map(uint32_t pid, const desc_t *d);

/* round.c */
double now(void);
void cores_note(group_t *g);
int cores_suffice(group_t *g);
int spins_of_a_wait(void);
int rank_alive(const group_t *g, int rank);
void futex_wake_all(_Atomic uint32_t *word);
int futex_wait_for(_Atomic uint32_t *word, uint32_t seen, double seconds);
void round_publish_until(group_t *g, uint32_t round);
int round_wait(group_t *g, uint32_t round, uint32_t last);
int round_wait_for(group_t *g, int rank, uint32_t round, uint32_t last);
int round_arrived(const group_t *g, uint32_t round);
int round_reached(const group_t *g, int rank, uint32_t round);
int round_fail(group_t *g, int rank, int status);
void round_abort(group_t *g, const char *reason, size_t length);
int round_unreadable(group_t *g, int rank);
int round_gone(group_t *g);
int round_left(const group_t *g);
int round_broken(const group_t *g, work_t *work);
char *slot_of(const group_t *g, int rank, uint32_t round);
desc_t *desc_of(const group_t *g, int rank, uint32_t round);

/* compare.c */
int awaited(const group_t *g, const work_t *j, const algorithm_t *a);
int round_there(const group_t *g, int from, uint32_t round);
int round_compare(group_t *g, work_t *work, uint32_t until);
int round_meet(group_t *g, work_t *work, int from);
int round_met(group_t *g, work_t *work, int from);
int round_settle(group_t *g, work_t *work, uint32_t most);
int disagree(group_t *g, int status);

/* move.c */
int work_tiny(const group_t *g, const work_t *j);

/* work.c */
const algorithm_t *choose(const group_t *g, const work_t *work);
const algorithm_t *work_direct_form(const group_t *g, const work_t *work); /* NULL: none for this one */
void work_patience(group_t *g, int behind);
void work_enter(group_t *g, work_t *work);
void work_start_round(group_t *g, work_t *work, const algorithm_t *a, size_t k);
int work_take_round(group_t *g, work_t *work, const algorithm_t *a, size_t k);
int work_end_round(group_t *g, work_t *work, const algorithm_t *a, size_t k, int checked);
int work_run_rounds(group_t *g, work_t *work, const algorithm_t *a, size_t k, size_t filled, int checked);
int work_single(const group_t *g, const work_t *work);
int work_full(const group_t *g);
int work_ready(group_t *g, work_t *work);
int work_run(group_t *g, work_t *work);

/* progress.c */
int work_submit(group_t *g, work_t *work, int async);
int group_settle(group_t *g, work_t *work);
int work_try(group_t *g, work_t *j);
int work_try_end(group_t *g, work_t *j);
int work_resume(group_t *g, work_t *j);
int work_finish(group_t *g, work_t *work, double seconds);
int work_test(group_t *g, work_t *work);
int group_stop(group_t *g);

/* reduce.c: dst[0..count) of each of `ndst` = fold over `nsrc` sources, in their order; AVG divides by nsrc */
void reduce_into(int dtype, int red, char *const *dst, int ndst, const char *const *src, int nsrc, size_t count);

/* slots.c */
void slot_put(group_t *g, char *slot, const char *from, size_t n);
void slot_take(char *to, const char *from, size_t n, int large);
int slots_streamed(const group_t *g);
size_t slots_measured(group_t *g);
void slots_note_speed(group_t *g, size_t bytes, double seconds, int last);
void slots_note_cell(group_t *g, size_t bytes, double seconds);

/* p2p.c */
typedef struct message message_t;
size_t p2p_bytes(int size);
int p2p_try(group_t *g, int send, int peer, char *data, size_t bytes);
message_t *p2p_start(group_t *g, int send, int peer, int tag, char *data, size_t bytes, int alone);
int p2p_finish(group_t *g, message_t *m, double seconds, int *peer, size_t *got);
int p2p_test(group_t *g, message_t *m);
void p2p_stop(group_t *g);

static inline const char *in_at(const work_t *j, int rank) {
    return j->ins ? (const char *)(uintptr_t)j->ins[rank] : j->in + (size_t)rank * j->in_stride;
}
static inline char *out_at(const work_t *j, int rank) {
    return j->outs ? (char *)(uintptr_t)j->outs[rank] : j->out + (size_t)rank * j->out_stride;
}
static inline void pause_cpu(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}
static inline size_t part(size_t total, size_t chunk, size_t k) {
    size_t begin = k * chunk;
    return begin >= total ? 0 : total - begin < chunk ? total - begin : chunk;
}
static inline size_t chunks(size_t total, size_t chunk) { return (total + chunk - 1) / chunk; }

#endif
