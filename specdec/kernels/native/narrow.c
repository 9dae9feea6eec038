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
int omp_get_thread_num(void);
#define THREAD omp_get_thread_num()

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
#define THREAD 0
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

// Columns of a state that are worked on at once, in a copy that the first-level cache holds.
#define COLUMNS 32
#define PIECES (COLUMNS / LANES)

// y <- a x + k uᵀ, the state after one token more. x and y [K, COLUMNS] may be one.
static void add_token(const float *x, float *y, ix K, float a, const float *k, const float *u) {
    vec own[PIECES];
    for (ix p = 0; p < PIECES; p++) own[p] = load(u + p * LANES);
    for (ix i = 0; i < K; i++)
        for (ix p = 0; p < PIECES; p++) {
            vec kept = all_lanes(a) * load(x + i * COLUMNS + p * LANES);
            store(y + i * COLUMNS + p * LANES, multiply_add(all_lanes(k[i]), own[p], kept));
        }
}

// y <- x S for two readers x, or for the first alone; S [K, COLUMNS].
static inline __attribute__((always_inline)) void read_state(const float *S, ix K, int readers,
                                                            const float *const *x, float (*y)[COLUMNS]) {
    vec sum[2][2][PIECES] = {0};  // of even and odd keys: neither waits for the other
    for (ix i = 0; i < K; i++)
        for (ix p = 0; p < PIECES; p++)
            for (int r = 0; r < readers; r++)
                sum[r][i & 1][p] = multiply_add(all_lanes(x[r][i]), load(S + i * COLUMNS + p * LANES), sum[r][i & 1][p]);
    for (int r = 0; r < readers; r++)
        for (ix p = 0; p < PIECES; p++) store(y[r] + p * LANES, sum[r][0][p] + sum[r][1][p]);
}

// MOST, the longest path and the widest window, is defined on the compiler's command line.

// A recurrent layer's records: where its parts lie, and how far apart slabs and places are, in floats.
typedef struct {
    float *update, *decay;
    ix update_slab, update_place, decay_slab, decay_place;
} records;

static inline float dot(const float *a, const float *b, ix n) {
    float sum = 0;
    for (ix i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

// Where each token finds the state it reads, and leaves the one after it, in as few blocks as hold what is still
// to be read: a chain needs one. `keep`: of each token the state after it is wanted. Returns how many blocks.
static ix place_states(ix M, const uint8_t *above, int keep, ix *parent, ix *from, ix *to) {
    ix unread[M + 1], spare[M + 1], spares = 0, blocks = 1;
    memset(unread, 0, sizeof unread);
    for (ix m = 0; m < M; m++) {
        parent[m] = m - 1;
        while (above && parent[m] >= 0 && !above[m * M + parent[m]]) parent[m]--;
        unread[parent[m] + 1]++;
    }
    for (ix m = 0; m < M; m++) {
        from[m] = parent[m] < 0 ? 0 : to[parent[m]];
        int last = --unread[parent[m] + 1] == 0, read = unread[m + 1] > 0;
        to[m] = -1;
        if (read || keep) to[m] = last ? from[m] : spares ? spare[--spares] : blocks++;
        if (!read && (last || keep)) spare[spares++] = last ? from[m] : to[m];
    }
    return blocks;
}

// Whole pieces have a size that the compiler knows: it copies them by vectors, others by a slow instruction.
static inline void take_columns(float *to, const float *from, ix rows, ix from_row, ix count) {
    for (ix i = 0; i < rows; i++, to += COLUMNS, from += from_row) {
        if (count == COLUMNS) {
            memcpy(to, from, COLUMNS * sizeof *to);
        } else {
            memcpy(to, from, count * sizeof *to);
            memset(to + count, 0, (COLUMNS - count) * sizeof *to);
        }
    }
}

static inline void give_columns(float *to, const float *from, ix rows, ix to_row, ix count) {
    for (ix i = 0; i < rows; i++, to += to_row, from += COLUMNS) {
        if (count == COLUMNS)
            memcpy(to, from, COLUMNS * sizeof *to);
        else
            memcpy(to, from, count * sizeof *to);
    }
}

// The gated delta rule (beta given) or Mamba-2 (beta null) over a window of M tokens of each of B rows, token by
// token, so that what a token reads is the same in every window: S <- a S + k uᵀ with u = beta (v - a k S), o = q S.
// q, k [B*M, G, K], v and out [B*M, H, W], decay (a's logarithm) and beta [B*M, H], keys [B, P, G, K] of the pending
// path, which is added first. place and snapshot null: the tokens are certain and the states move on. Otherwise each
// leaves a record, or the state after it in a slot of its own; above[b, i, j] says whether j is above i or i itself.
// Heads are independent: they are shared out between torch's own threads where there is enough to do.
void scan_window(const float *q, const float *k, const float *v, const float *decay, const float *beta, float *out, ix B,
           ix M, ix G, ix H, ix K, ix W, float *state, ix state_stride, const ix *slot, const records *r,
           const float *keys, const ix *path_slab, const ix *path_place, const ix *path_length, ix P,
           const ix *slab, const ix *place, const ix *snapshot, const uint8_t *above) {
    #pragma omp parallel for collapse(2) schedule(static) if (pays(0.2 * B * (M + P) * H * K * W))
    for (ix b = 0; b < B; b++)
        for (ix h = 0; h < H; h++) {
            ix g = h / (H / G), first = b * M, pending = path_length ? path_length[b] : 0;
            ix parent[M + 1], from[M + 1], to[M + 1];
            ix blocks = place_states(M, above ? above + first * M : 0, !place, parent, from, to);
            float held[blocks][K * COLUMNS] __attribute__((aligned(64)));
            float kept[M + 1], self[M + 1], path_kept[MOST];
            for (ix n = 0; n < pending; n++)
                path_kept[n] = expf(r->decay[path_slab[b * P + n] * r->decay_slab +
                                             path_place[b * P + n] * r->decay_place + h]);
            for (ix m = 0; m < M; m++) {
                ix t = first + m;
                kept[m] = expf(decay[t * H + h]);
                self[m] = dot(q + (t * G + g) * K, k + (t * G + g) * K, K);
                if (place) r->decay[slab[t] * r->decay_slab + place[t] * r->decay_place + h] = decay[t * H + h];
            }
            for (ix c = 0; c < W; c += COLUMNS) {
                ix count = W - c < COLUMNS ? W - c : COLUMNS;
                float *S = state + slot[b] * state_stride + h * K * W + c, u[COLUMNS], found[2][COLUMNS];
                take_columns(held[0], S, K, W, count);
                // Before this window's records, which may take the places of those that end here.
                for (ix n = 0; n < pending; n++) {
                    take_columns(u, r->update + path_slab[b * P + n] * r->update_slab +
                                        path_place[b * P + n] * r->update_place + h * W + c, 1, 0, count);
                    add_token(held[0], held[0], K, path_kept[n], keys + ((b * P + n) * G + g) * K, u);
                }
                if (pending) give_columns(S, held[0], K, W, count);
                for (ix m = 0; m < M; m++) {
                    ix t = first + m;
                    const float *x[2] = {q + (t * G + g) * K, k + (t * G + g) * K}, *above_it = held[from[m]];
                    float a = kept[m], own = beta ? beta[t * H + h] : 0;
                    take_columns(u, v + (t * H + h) * W + c, 1, 0, count);
                    if (beta) {
                        read_state(above_it, K, 2, x, found);
                        for (ix w = 0; w < COLUMNS; w++) u[w] = own * (u[w] - a * found[1][w]);
                    } else {
                        read_state(above_it, K, 1, x, found);
                    }
                    for (ix w = 0; w < COLUMNS; w++) found[0][w] = a * found[0][w] + self[m] * u[w];
                    give_columns(out + (t * H + h) * W + c, found[0], 1, 0, count);
                    if (place)
                        give_columns(r->update + slab[t] * r->update_slab + place[t] * r->update_place + h * W + c, u, 1,
                                     0, count);
                    if (to[m] >= 0) add_token(above_it, held[to[m]], K, a, x[1], u);
                    if (snapshot)
                        give_columns(state + snapshot[t] * state_stride + h * K * W + c, held[to[m]], K, W, count);
                }
                if (!place && !snapshot) give_columns(S, held[0], K, W, count);
            }
        }
}

// to's rows <- from's rows, chosen by ids where there are any; distances in bytes.
void gather(const char *from, ix by_from, const ix *ids, ix rows, ix bytes, char *to, ix by_to) {
    for (ix r = 0; r < rows; r++) memcpy(to + r * by_to, from + (ids ? ids[r] : r) * by_from, bytes);
}

// Queries of an attention head that a thread takes at once, those that share a register's keys, and keys that are
// widened at once.
#define STRIP 16
#define BESIDE_ROWS 4
#define TOGETHER 32

static inline float sum_lanes(vec x) {
    float lane[LANES], sum = 0;
    store(lane, x);
    for (int i = 0; i < LANES; i++) sum += lane[i];
    return sum;
}

// Keys, or values, against so many rows of queries: scores are written, or weights read, for each row `by_row` apart.
static inline __attribute__((always_inline)) void meet(int rows, const float *query, float *sum, const float *wide,
                                                      ix count, ix width, float *score, ix by_row, int values) {
    if (!values) {
        for (ix n = 0; n < count; n++) {
            vec total[BESIDE_ROWS] = {0};
            for (ix i = 0; i < width; i += LANES)
                for (int r = 0; r < rows; r++)
                    total[r] = multiply_add(load(query + r * width + i), load(wide + n * width + i), total[r]);
            for (int r = 0; r < rows; r++) score[r * by_row + n] = sum_lanes(total[r]);
        }
        return;
    }
    for (ix i = 0; i < width; i += LANES) {
        vec total[BESIDE_ROWS];
        for (int r = 0; r < rows; r++) total[r] = load(sum + r * width + i);
        for (ix n = 0; n < count; n++)
            for (int r = 0; r < rows; r++)
                total[r] = multiply_add(all_lanes(score[r * by_row + n]), load(wide + n * width + i), total[r]);
        for (int r = 0; r < rows; r++) store(sum + r * width + i, total[r]);
    }
}

static void meet_rows(ix rows, const float *query, float *sum, const float *wide, ix count, ix width, float *score,
                      ix by_row, int values) {
    if (rows >= 4)
        meet(4, query, sum, wide, count, width, score, by_row, values);
    else if (rows == 3)
        meet(3, query, sum, wide, count, width, score, by_row, values);
    else if (rows == 2)
        meet(2, query, sum, wide, count, width, score, by_row, values);
    else
        meet(1, query, sum, wide, count, width, score, by_row, values);
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
