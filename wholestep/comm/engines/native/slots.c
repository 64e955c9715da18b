/* Copies into slots and out of them.
 *
 * Where two cores share a cache, the fastest way from one to the other is through it. Where they do not (two dies, two
 * sockets; a virtual machine may find itself there any second), reading what another core has just written is slow, and
 * writing past the caches is fast. All-reduce of private memory, 2 ranks, Zen 4, GB/s at 1 MB | 64 MB:
 *     cores that share a cache: through it 21.6 | 11.8, past it 11.5 | 6.5
 *     cores that do not:        through it  2.1 |  2.1, past it 13.4 | 9.6
 * So each rank times what it does with slots; when that is slow it asks all, for a while, to write past the caches. */
#if defined(__x86_64__)
#include <emmintrin.h>
#endif
#include <string.h>

#include "shm.h"

#define LEAST (8 * 1024)    /* bytes from which on either is worth it */
#define SLOW 7.5e9          /* bytes a second in and out of slots: 12 to 40 where cores share a cache, 3 to 6 where not */
#define SPAN (4 << 20)      /* bytes that are judged together, or a collective's: its slots are filled first, and read fast */
#define FIRST 1e-6          /* seconds that are not for the bytes: clocks, first misses */
#define IN_A_ROW 6          /* spans as slow as that, before it asks */
#define A_WHILE 200000000LL /* nanoseconds; then the cache is tried again, at the cost of some slow spans */

/* Past the caches: for what another core reads, or what is not read soon. */
static void stream(char *to, const char *from, size_t n) {
#if defined(__x86_64__)
    size_t head = -(uintptr_t)to & 63;
    if (head > n) head = n;
    memcpy(to, from, head);
    to += head, from += head, n -= head;
    for (; n >= 64; to += 64, from += 64, n -= 64) {
        const __m128i *src = (const __m128i *)from;
        __m128i a = _mm_loadu_si128(src), b = _mm_loadu_si128(src + 1);
        __m128i c = _mm_loadu_si128(src + 2), d = _mm_loadu_si128(src + 3), *dst = (__m128i *)to;
        _mm_stream_si128(dst, a), _mm_stream_si128(dst + 1, b), _mm_stream_si128(dst + 2, c), _mm_stream_si128(dst + 3, d);
    }
    _mm_sfence();
#endif
    memcpy(to, from, n);
}

static int64_t nanoseconds(void) { return (int64_t)(now() * 1e9); }

/* Whether somebody wants slots to be written past the caches. */
int slots_streamed(const group_t *g) {
    int64_t latest = 0;
    for (int r = 0; r < g->size; r++) {
        int64_t until = (int64_t)atomic_load_explicit(&g->ctl[r].streams_until, memory_order_relaxed);
        if (until > latest) latest = until;
    }
    return latest && latest > nanoseconds();
}

void slot_put(group_t *g, char *slot, const char *from, size_t n) {
    if (!n) return; /* an empty part may come with no address */
    g->put += n;
    if (g->streaming && n >= LEAST) stream(slot, from, n);
    else memcpy(slot, from, n);
}

/* `large`: the output is larger than the caches. Written past them, its memory need not be read first: all-gather of
 * 2 x 64 MB 8 ms, through them 14; all-to-all of 64 MB 1.3 of a plain copy, through them 1.6. */
void slot_take(char *to, const char *from, size_t n, int large) {
    if (!n || to == from) return;
    if (large && n >= LEAST) stream(to, from, n);
    else memcpy(to, from, n);
}

/* Bytes of the slots that were written since the last round was read, and of those of this round, if they tell something
 * about the caches, else 0. */
size_t slots_measured(group_t *g) {
    size_t bytes = g->filled;
    for (int r = 0; r < g->size; r++) {
        const desc_t *d = desc_of(g, r, g->reading);
        if (r == g->rank) continue;
        if (d->streamed) return g->judged = 0;
        bytes += d->put;
    }
    return bytes >= LEAST ? bytes : 0;
}

static void ask(group_t *g) {
    atomic_store(&g->ctl[g->rank].streams_until, (uint64_t)(nanoseconds() + A_WHILE));
}

/* Messages: a cell has been copied in, from memory perhaps, or out. */
#define SLOW_CELL 4e9 /* bytes a second: 8 and more where cores share a cache, 2 where not */
void slots_note_cell(group_t *g, size_t bytes, double seconds) {
    g->slow_cells = (double)bytes < SLOW_CELL * seconds ? g->slow_cells + 1 : 0;
    if (g->slow_cells >= IN_A_ROW) g->slow_cells = 0, ask(g);
}

/* `last`: of a collective's rounds. */
void slots_note_speed(group_t *g, size_t bytes, double seconds, int last) {
    if (g->judged == 0) g->judging = 0;
    if (bytes) g->judged += bytes + g->beside, g->judging += g->filling + seconds;
    g->filled = 0, g->filling = 0, g->beside = 0;
    if (!g->judged || (g->judged < SPAN && !last)) return;
    int rest = g->judged < SPAN && g->longer; /* what a long collective has read at its end */
    if (!rest) g->slow = (double)g->judged < SLOW * (g->judging - FIRST) ? g->slow + 1 : 0;
    g->judged = 0, g->longer = !last;
    if (g->slow < IN_A_ROW) return;
    g->slow = 0;
    ask(g);
}
