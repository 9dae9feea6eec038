// The operations of a narrow window, each in one call: what a decode step spends beside its matrix products
// is mostly the cost of calling. narrow.inc is compiled once for each type that tensors may have.

#include <math.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "vectors.inc"

typedef long ix;

#ifdef _OPENMP
int omp_get_max_threads(void);

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}

// Whether work of so many nanoseconds is worth sharing with torch's threads. Waking them takes 2 us, or 50 where
// another thread of this process has called threads of its own, for then all sleep at once: so it is timed now and then.
static int pays(double work_ns) {
    static __thread double wake_ns;
    static __thread unsigned asked;
    if (omp_get_max_threads() < 2) return 0;
    if (asked++ % 4096 == 0) {
        double from_ns = 0;
        for (int i = 0; i < 4; i++) {  // the first wakes those that slept since the last step
            if (i == 1) from_ns = now_ns();
            #pragma omp parallel
            __asm__ volatile("" ::: "memory");
        }
        wake_ns = (now_ns() - from_ns) / 3;
    }
    return work_ns > 3 * wake_ns;
}
#else
static int pays(double work_ns) { return 0 * work_ns; }
#endif

static inline float exp_(float x) {
    x = x > 88.0f ? 88.0f : x < -87.0f ? -87.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = x - n * 0.693145752f - n * 1.42860677e-6f;
    float p = 1.98756919e-4f;
    p = p * r + 1.39819995e-3f;
    p = p * r + 8.33345205e-3f;
    p = p * r + 4.16657962e-2f;
    p = p * r + 1.66666657e-1f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    union { float f; int32_t i; } power = {.i = ((int32_t)n + 127) << 23};
    return p * power.f;
}

// To 2^-13, for weights that are rounded to 2^-9: torch's attention in bfloat16 takes this one, and with a better one
// more weights would round the other way. 2^y from the bits of y, less a cubic in its fraction (Malossi and others).
static inline float exp_rough(float x) {
    if (!(x >= -87.3f)) return x < 0 ? 0.0f : x;  // NaN stays
    float y = x * 1.44269504f, f = y - floorf(y);
    y -= ((f * -0.0792042402f - 0.224338365f) * f + 0.303542605f) * f + 1.07034348e-4f;
    union { int32_t i; float f; } power = {.i = (int32_t)(y * 8388608.0f + 1065353216.0f)};
    return power.f;
}

static inline float sigmoid_(float x) { return 1.0f / (1.0f + exp_(-x)); }

static inline float from_bf16(uint16_t x) {
    union { uint32_t i; float f; } u = {.i = (uint32_t)x << 16};
    return u.f;
}

static inline uint16_t to_bf16(float x) {  // round to nearest, ties to even
    union { float f; uint32_t i; } u = {.f = x};
    uint16_t nan = (u.i & 0x7fffffffu) > 0x7f800000u ? 0x7fc0 : 0;
    return nan ? nan : (uint16_t)((u.i + 0x7fffu + ((u.i >> 16) & 1u)) >> 16);
}

#define TILE 4

// to <- scale from + sum_n k_n u_n, each weighted; `to` may be `from`. Rows stay in the cache from tile to tile.
static void fold_state(const float *from, float *to, ix K, ix W, float scale, ix count, const float *const *k,
                       const float *const *u, const float *weight) {
    for (ix i = 0; i < K; i++)
        for (ix n = 0; n < count; n += TILE) {
            const float *x = (n ? to : from) + i * W, *rows[TILE];
            float *y = to + i * W, own = n ? 1.0f : scale, c[TILE];
            for (ix j = 0; j < TILE; j++) {
                rows[j] = u[n + j < count ? n + j : n];
                c[j] = n + j < count ? k[n + j][i] * weight[n + j] : 0.0f;
            }
            const float *u0 = rows[0], *u1 = rows[1], *u2 = rows[2], *u3 = rows[3];
            if (n + 1 == count)
                #pragma omp simd
                for (ix w = 0; w < W; w++) y[w] = own * x[w] + c[0] * u0[w];
            else
                #pragma omp simd
                for (ix w = 0; w < W; w++)
                    y[w] = own * x[w] + (c[0] * u0[w] + c[1] * u1[w]) + (c[2] * u2[w] + c[3] * u3[w]);
        }
}

// y_n <- x_n S.
static void read_state(const float *S, ix K, ix W, ix count, const float *const *x, float *const *y) {
    for (ix n = 0; n < count; n++) memset(y[n], 0, W * sizeof *y[n]);
    for (ix i = 0; i < K; i += TILE)
        for (ix n = 0; n < count; n++) {
            const float *s = S + i * W, *c = x[n] + i;
            float *out = y[n];
            if (i + TILE <= K)
                #pragma omp simd
                for (ix w = 0; w < W; w++)
                    out[w] += (c[0] * s[w] + c[1] * s[W + w]) + (c[2] * s[2 * W + w] + c[3] * s[3 * W + w]);
            else
                for (ix j = 0; j < K - i; j++)
                    #pragma omp simd
                    for (ix w = 0; w < W; w++) out[w] += c[j] * s[j * W + w];
        }
}

// MOST, the longest path and the widest window, is defined on the compiler's command line.

// A recurrent layer's records: where its parts lie, and how far apart slabs and places are, in floats.
typedef struct {
    float *update, *decay;
    ix update_slab, update_place, decay_slab, decay_place;
} records;

// Each record holds its own log-decay; what follows a record on the path is summed from the path's end. keys
// [count, G, K].
static void fold_path(float *S, const records *r, const float *keys, ix G, ix H, ix K, ix W, ix h, const ix *slab,
                      const ix *place, ix count) {
    const float *k[MOST], *u[MOST];
    float weight[MOST], after = 0;
    for (ix n = count - 1; n >= 0; n--) {
        k[n] = keys + (n * G + h / (H / G)) * K;
        u[n] = r->update + slab[n] * r->update_slab + place[n] * r->update_place + h * W;
        weight[n] = expf(after);
        after += r->decay[slab[n] * r->decay_slab + place[n] * r->decay_place + h];
    }
    fold_state(S, S, K, W, expf(after), count, k, u, weight);
}

static inline float dot(const float *a, const float *b, ix n) {
    float sum = 0;
    for (ix i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

// What M nodes of one head read from the state above them all, and add to it: o_m and u_m, both of W. The entries of
// one token are qk and v apart from the next token's, those of decay and beta H. above null is a chain, beta null
// Mamba-2.
typedef struct {
    const float *q, *k, *v, *decay, *beta;
    ix qk, by_v, H, K, W;
} head;

static void solve(const float *S, const head *x, ix M, const uint8_t *above, float *const *o, float *const *u) {
    ix K = x->K, W = x->W, count = 0;
    const float *reader[2 * MOST];
    float *found[2 * MOST];
    double path[MOST];
    for (ix m = 0; m < M; m++) {
        reader[count] = x->q + m * x->qk, found[count++] = o[m];
        if (x->beta) reader[count] = x->k + m * x->qk, found[count++] = u[m];
    }
    read_state(S, K, W, count, reader, found);
    for (ix m = 0; m < M; m++) {
        const float *k = x->k + m * x->qk, *q = x->q + m * x->qk, *v = x->v + m * x->by_v;
        const uint8_t *row = above ? above + m * M : 0;
        float *out = o[m], *own = u[m];
        path[m] = 0;
        for (ix j = 0; j <= m; j++)
            if (!row || row[j]) path[m] += x->decay[j * x->H];
        float a = expf((float)path[m]), beta = x->beta ? x->beta[m * x->H] : 1.0f;
        for (ix w = 0; w < W; w++) out[w] *= a;
        if (x->beta)
            for (ix w = 0; w < W; w++) own[w] *= a;
        for (ix j = 0; j < m; j++) {
            if (row && !row[j]) continue;
            const float *kj = x->k + j * x->qk, *uj = u[j];
            float between = expf((float)(path[m] - path[j]));
            float read = between * dot(q, kj, K);
            #pragma omp simd
            for (ix w = 0; w < W; w++) out[w] += read * uj[w];
            if (!x->beta) continue;
            float error = between * dot(k, kj, K);
            #pragma omp simd
            for (ix w = 0; w < W; w++) own[w] += error * uj[w];
        }
        if (x->beta)
            for (ix w = 0; w < W; w++) own[w] = beta * (v[w] - own[w]);
        else
            memcpy(own, v, W * sizeof *own);
        float self = dot(q, k, K);
        #pragma omp simd
        for (ix w = 0; w < W; w++) out[w] += self * own[w];
    }
}

// The state after M certain tokens, of which `solve` has made the updates; `to` may be `from`.
static void advance(const float *from, float *to, const head *x, ix M, float *const *u) {
    const float *k[MOST];
    float weight[MOST], after = 0;
    for (ix m = M - 1; m >= 0; m--) {
        k[m] = x->k + m * x->qk;
        weight[m] = expf(after);
        after += x->decay[m * x->H];
    }
    fold_state(from, to, x->K, x->W, expf(after), M, k, (const float *const *)u, weight);
}

static head later(const head *x, ix m) {
    head part = *x;
    part.q += m * x->qk, part.k += m * x->qk, part.v += m * x->by_v, part.decay += m * x->H;
    if (x->beta) part.beta += m * x->H;
    return part;
}

// Certain tokens that are solved together: among more of them than this, what each asks of the others outweighs what
// is saved in reading the state.
#define CERTAIN 16

// The gated delta rule (beta given) or Mamba-2 (beta null) over a window of M tokens of each of B rows.
// q, k [B*M, G, K], v and out [B*M, H, W], decay and beta [B*M, H], keys [B, P, G, K] of the pending path. place and
// snapshot null: the tokens are certain and the states move on. Otherwise each leaves a record, or the state after
// it in a slot of its own; above[b, i, j] says whether j is above i or i itself. Heads are independent: they are
// shared out between torch's own threads where there is enough to do.
void scan_window(const float *q, const float *k, const float *v, const float *decay, const float *beta, float *out, ix B,
           ix M, ix G, ix H, ix K, ix W, float *state, ix state_stride, const ix *slot, const records *r,
           const float *keys, const ix *path_slab, const ix *path_place, const ix *path_length, ix P,
           const ix *slab, const ix *place, const ix *snapshot, const uint8_t *above) {
    #pragma omp parallel for collapse(2) schedule(static) if (pays(0.2 * B * M * H * K * W))
    for (ix b = 0; b < B; b++)
        for (ix h = 0; h < H; h++) {
            ix g = h / (H / G), first = b * M;
            float *S = state + slot[b] * state_stride + h * K * W;
            float *o[M], *u[M], own[place ? 1 : M * W];
            head x = {q + (first * G + g) * K, k + (first * G + g) * K, v + (first * H + h) * W, decay + first * H + h,
                      beta ? beta + first * H + h : 0, G * K, H * W, H, K, W};
            // Before this window's records, which may take the places of those that end here.
            if (path_length && path_length[b])
                fold_path(S, r, keys + b * P * G * K, G, H, K, W, h, path_slab + b * P, path_place + b * P,
                          path_length[b]);
            for (ix m = 0; m < M; m++) {
                ix t = first + m;
                o[m] = out + (t * H + h) * W;
                u[m] = place ? r->update + slab[t] * r->update_slab + place[t] * r->update_place + h * W : own + m * W;
                if (place) r->decay[slab[t] * r->decay_slab + place[t] * r->decay_place + h] = decay[t * H + h];
            }
            if (place) {
                solve(S, &x, M, above ? above + first * M : 0, o, u);
                continue;
            }
            if (!snapshot) {
                for (ix from = 0; from < M; from += CERTAIN) {
                    ix count = M - from < CERTAIN ? M - from : CERTAIN;
                    head part = later(&x, from);
                    solve(S, &part, count, 0, o + from, u + from);
                    advance(S, S, &part, count, u + from);
                }
                continue;
            }
            for (ix m = 0; m < M; m++) {
                ix parent = m - 1;
                while (above && parent >= 0 && !above[(first + m) * M + parent]) parent--;
                const float *from = parent < 0 ? S : state + snapshot[first + parent] * state_stride + h * K * W;
                head node = later(&x, m);
                solve(from, &node, 1, 0, o + m, u + m);
                advance(from, state + snapshot[first + m] * state_stride + h * K * W, &node, 1, u + m);
            }
        }
}

// to's rows <- from's rows, chosen by ids where there are any; distances in bytes.
void gather(const char *from, ix by_from, const ix *ids, ix rows, ix bytes, char *to, ix by_to) {
    for (ix r = 0; r < rows; r++) memcpy(to + r * by_to, from + (ids ? ids[r] : r) * by_from, bytes);
}

#include "sampling.inc"

// Of products: outputs that are laid out together, and panels that a thread takes at once.
#define PANEL 16
#define PANELS 4
#define PARTS (PANEL / LANES)
#define WIDEST (PANELS * PARTS)
// Rows of a tile, and panels of one with so many rows: as many as leave registers for weights and a row.
#if LANES == 16
#define ROWS 6
#define BESIDE(rows) 4
#else
#define ROWS 4
#define BESIDE(rows) ((rows) == 1 ? 4 : (rows) == 2 ? 2 : 1)
#endif
// How long a thread takes to read a byte of weights, and to multiply one with a row.
#define READ_NS 0.01
#define MULTIPLY_NS (PAIRED ? 0.0105 : 0.34 / LANES)
#define INTEGER_NS 0.006
// To round a number to 8 bits.
#define ROUND_NS 0.3

#include "integer.inc"

#define NAME(op) op##_float32
#define real float
#define LOAD(x) (x)
#define STORE(x) (x)
#define EXP(x) exp_(x)
#define WEIGHTS(panel, part, second) load((panel) + (second) * PANEL + (part) * LANES)
#define PAIRED 0
#define operand float
#include "narrow.inc"
#include "matrix.inc"
#undef NAME
#undef real
#undef LOAD
#undef STORE
#undef EXP
#undef WEIGHTS
#undef PAIRED
#undef operand

#define NAME(op) op##_bfloat16
#define real uint16_t
#define LOAD(x) from_bf16(x)
#define STORE(x) to_bf16(x)
#define EXP(x) exp_rough(x)
#define WEIGHTS(panel, part, second) load_half((panel) + 2 * (part) * LANES, second)
#define PAIRED UNITS
#if PAIRED
#define operand uint16_t
#else
#define operand float
#endif
#include "narrow.inc"
#include "matrix.inc"
