/* Reductions of many sources into one or more destinations, vectorised by the compiler for the machine at hand.
 *
 * bf16 and fp16 are summed in float32 and rounded once. The sources are folded in their order on every rank, so
 * that all ranks get the same bits. */
#include <string.h>

#include "shm.h"

/* Without unroll-and-jam, which gcc 12 does to the loop over sources at the price of the vectors inside it: four sources
 * of 256 KB then take 127 us in place of 22. */
#if defined(__GNUC__) && !defined(__clang__)
#define OPTIMIZED optimize("O3", "no-loop-unroll-and-jam")
#if defined(__x86_64__) && defined(__GLIBC__)
#define FAST __attribute__((target_clones("avx512f", "avx2", "default"), OPTIMIZED))
#else
#define FAST __attribute__((OPTIMIZED))
#endif
#else
#define FAST
#endif
#define LOOP _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++)
#define BLOCK 1024 /* accumulators that stay in L1 */

static inline float bits_float(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline uint32_t float_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

static inline float load_bf16(uint16_t h) { return bits_float((uint32_t)h << 16); }
static inline uint16_t save_bf16(float f) {
    uint32_t u = float_bits(f), nan = (u & 0x7fffffffu) > 0x7f800000u;
    uint32_t even = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
    return (uint16_t)(nan ? 0x7fc0u : even);
}

static inline float load_f16(uint16_t h) {
    uint32_t special = (h & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0;
    float f = bits_float((uint32_t)(h & 0x7fffu) << 13) * 0x1p112f; /* also right for denormals */
    return bits_float(float_bits(f) | special | (uint32_t)(h & 0x8000u) << 16);
}
static inline uint16_t save_f16(float f) {
    uint32_t sign = float_bits(f) >> 16 & 0x8000u, u = float_bits(f) & 0x7fffffffu;
    uint32_t normal = (u - (112u << 23) + 0xfffu + (u >> 13 & 1)) >> 13;
    uint32_t small = float_bits(bits_float(u) + 0.5f) - float_bits(0.5f); /* the addition rounds denormals */
    uint32_t large = u > 0x7f800000u ? 0x7e00u : 0x7c00u;
    return (uint16_t)(sign | (u >= 143u << 23 ? large : u < 113u << 23 ? small : normal));
}

#define SAME(x) (x)
#define SHARE(x) ((x) * share)
#define ADD(a, b) ((a) + (b))
#define MUL(a, b) ((a) * (b))
#define LESS(a, b) ((a) < (b) || (a) != (a) ? (a) : (b)) /* NaN passes on */
#define MORE(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define AND(a, b) ((a) & (b))
#define OR(a, b) ((a) | (b))
#define XOR(a, b) ((a) ^ (b))

/* T stored, A accumulated; two sources go straight into one destination, more fold in a block of accumulators. */
#define FOLD(T, A, LOAD, SAVE, OP)                                                            \
    if (nsrc == 2 && ndst == 1 && red != RED_AVG) {                                           \
        const T *a = (const T *)src[0], *b = (const T *)src[1];                               \
        T *out = (T *)dst[0];                                                                 \
        n = count;                                                                            \
        LOOP { A x = LOAD(a[i]), y = LOAD(b[i]); out[i] = (T)SAVE((A)OP(x, y)); }             \
        return;                                                                               \
    } else if (nsrc == 2) {                                                                   \
        const T *a = (const T *)src[0] + at, *b = (const T *)src[1] + at;                     \
        LOOP { A x = LOAD(a[i]), y = LOAD(b[i]); acc[i] = (A)OP(x, y); }                      \
    } else {                                                                                  \
        const T *a = (const T *)src[0] + at;                                                  \
        LOOP acc[i] = LOAD(a[i]);                                                             \
        for (int s = 1; s < nsrc; s++) {                                                      \
            const T *b = (const T *)src[s] + at;                                              \
            LOOP { A x = acc[i], y = LOAD(b[i]); acc[i] = (A)OP(x, y); }                      \
        }                                                                                     \
    }                                                                                         \
    break;

#define KERNEL(NAME, T, A, LOAD, SAVE, BITS)                                                                   \
    FAST static void NAME(int red, char *const *dst, int ndst, const char *const *src, int nsrc, size_t count) { \
        for (size_t at = 0; at < count; at += BLOCK) {                                                         \
            size_t n = count - at < BLOCK ? count - at : BLOCK;                                                \
            A acc[BLOCK];                                                                                      \
            switch (red) {                                                                                     \
            case RED_SUM: case RED_AVG: FOLD(T, A, LOAD, SAVE, ADD)                                            \
            case RED_PRODUCT: FOLD(T, A, LOAD, SAVE, MUL)                                                      \
            case RED_MIN: FOLD(T, A, LOAD, SAVE, LESS)                                                         \
            case RED_MAX: FOLD(T, A, LOAD, SAVE, MORE)                                                         \
            BITS(T, A, LOAD, SAVE)                                                                             \
            }                                                                                                  \
            if (red == RED_AVG) LOOP acc[i] = (A)(acc[i] / (A)nsrc);                                           \
            for (int d = 0; d < ndst; d++) {                                                                   \
                T *out = (T *)dst[d] + at;                                                                     \
                LOOP out[i] = (T)SAVE(acc[i]);                                                                 \
            }                                                                                                  \
        }                                                                                                      \
    }
#define NO_BITS(T, A, LOAD, SAVE)
/* The mean as a sum of products, which is what data parallelism rounds. */
#define WITH_MEAN(T, A, LOAD, SAVE)                \
    case RED_MEAN: {                               \
        const A share = (A)(1.0 / nsrc);           \
        FOLD(T, A, SHARE, SAVE, ADD)               \
    }
#define WITH_BITS(T, A, LOAD, SAVE)                \
    case RED_BAND: FOLD(T, A, LOAD, SAVE, AND)     \
    case RED_BOR: FOLD(T, A, LOAD, SAVE, OR)       \
    case RED_BXOR: FOLD(T, A, LOAD, SAVE, XOR)

KERNEL(fold_f32, float, float, SAME, SAME, WITH_MEAN)
KERNEL(fold_f64, double, double, SAME, SAME, WITH_MEAN)
KERNEL(fold_f16, uint16_t, float, load_f16, save_f16, NO_BITS)
KERNEL(fold_bf16, uint16_t, float, load_bf16, save_bf16, NO_BITS)
KERNEL(fold_u8, uint8_t, uint8_t, SAME, SAME, WITH_BITS)
KERNEL(fold_i8, int8_t, int8_t, SAME, SAME, WITH_BITS)
KERNEL(fold_i16, int16_t, int16_t, SAME, SAME, WITH_BITS)
KERNEL(fold_i32, int32_t, int32_t, SAME, SAME, WITH_BITS)
KERNEL(fold_i64, int64_t, int64_t, SAME, SAME, WITH_BITS)
KERNEL(fold_u16, uint16_t, uint16_t, SAME, SAME, WITH_BITS)
KERNEL(fold_u32, uint32_t, uint32_t, SAME, SAME, WITH_BITS)
KERNEL(fold_u64, uint64_t, uint64_t, SAME, SAME, WITH_BITS)

void reduce_into(int dtype, int red, char *const *dst, int ndst, const char *const *src, int nsrc, size_t count) {
    switch (dtype) {
    case T_F32: fold_f32(red, dst, ndst, src, nsrc, count); break;
    case T_F64: fold_f64(red, dst, ndst, src, nsrc, count); break;
    case T_F16: fold_f16(red, dst, ndst, src, nsrc, count); break;
    case T_BF16: fold_bf16(red, dst, ndst, src, nsrc, count); break;
    case T_U8: fold_u8(red, dst, ndst, src, nsrc, count); break;
    case T_I8: fold_i8(red, dst, ndst, src, nsrc, count); break;
    case T_I16: fold_i16(red, dst, ndst, src, nsrc, count); break;
    case T_I32: fold_i32(red, dst, ndst, src, nsrc, count); break;
    case T_I64: fold_i64(red, dst, ndst, src, nsrc, count); break;
    case T_U16: fold_u16(red, dst, ndst, src, nsrc, count); break;
    case T_U32: fold_u32(red, dst, ndst, src, nsrc, count); break;
    case T_U64: fold_u64(red, dst, ndst, src, nsrc, count); break;
    }
}
