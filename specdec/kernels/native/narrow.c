// The operations of a narrow window, each in one call: what a decode step spends beside its matrix products
// is mostly the cost of calling. narrow.inc is compiled once for each type that tensors may have.

#define _GNU_SOURCE  // for the affinity of threads
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "vectors.inc"

typedef long ix;

#include "pool.inc"

// Room that a thread keeps for what is between two steps of an operation; the next operation has it anew.
#define ROOMY (1 << 20)
typedef struct { size_t bytes; char at[] __attribute__((aligned(64))); } roomy;
static pthread_key_t kept_room;
static pthread_once_t room_asked = PTHREAD_ONCE_INIT;

static void make_room_key(void) { pthread_key_create(&kept_room, free); }

static void *workspace(size_t bytes) {
    pthread_once(&room_asked, make_room_key);
    roomy *own = pthread_getspecific(kept_room);
    if (!own || own->bytes < bytes) {
        size_t wanted = (sizeof *own + bytes + (bytes < ROOMY ? bytes : 0) + 63) / 64 * 64;  // grows seldom
        free(own);
        own = aligned_alloc(64, wanted);
        if (!own) abort();
        own->bytes = wanted - sizeof *own;
        pthread_setspecific(kept_room, own);
    }
    return own->at;
}

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

// Columns of a state that are worked on at once, in a copy that the first-level cache holds, and those of one sweep.
#define COLUMNS 32
#define SWEPT (2 * LANES)

// S [K, COLUMNS] as it is read from `from`, after n tokens more: S <- a S + k uᵀ. It is left at `to`, and `also` there,
// unless these are null; y <- x S for as many readers x. Rows lie so far apart. What is read next is named ahead.
static inline __attribute__((always_inline)) void sweep(const float *from, ix by_from, float *to, ix by_to, float *also,
                                                       ix K, ix n, const float *a, const float *const *k,
                                                       const float *const *u, int readers, const float *const *x,
                                                       float (*y)[COLUMNS]) {
    for (ix c = 0; c < COLUMNS; c += SWEPT) {
        vec sum[2][2][2] = {0};  // of even and odd keys: neither waits for the other
        for (ix first = 0; first < K; first += 2)
            #pragma GCC unroll 2
            for (int odd = 0; odd < 2; odd++) {
                ix i = first + odd;
                if (i == K) break;
                #pragma GCC unroll 2
                for (int v = 0; v < 2; v++) {
                    ix at = c + v * LANES;
                    vec s = load(from + i * by_from + at);
                    for (ix t = 0; t < n; t++)
                        s = multiply_add(all_lanes(k[t][i]), load(u[t] + at), all_lanes(a[t]) * s);
                    if (to) store(to + i * by_to + at, s);
                    if (also) store(also + i * by_from + at, s);
                    #pragma GCC unroll 2
                    for (int r = 0; r < readers; r++)
                        sum[r][odd][v] = multiply_add(all_lanes(x[r][i]), s, sum[r][odd][v]);
                }
            }
        for (int r = 0; r < readers; r++)
            for (int v = 0; v < 2; v++) store(y[r] + c + v * LANES, sum[r][0][v] + sum[r][1][v]);
    }
}

// A token's way from one block to another, or in place.
static void add_token(const float *from, float *to, ix K, float a, const float *k, const float *u) {
    sweep(from, COLUMNS, to, COLUMNS, 0, K, 1, &a, &k, &u, 0, 0, 0);
}

// The same in place, on the way of the readers.
static void add_and_read(float *S, ix K, float a, const float *k, const float *u, int readers, const float *const *x,
                         float (*y)[COLUMNS]) {
    if (readers == 2)
        sweep(S, COLUMNS, S, COLUMNS, 0, K, 1, &a, &k, &u, 2, x, y);
    else
        sweep(S, COLUMNS, S, COLUMNS, 0, K, 1, &a, &k, &u, 1, x, y);
}

static void read_state(const float *S, ix K, int readers, const float *const *x, float (*y)[COLUMNS]) {
    if (readers == 2)
        sweep(S, COLUMNS, 0, 0, 0, K, 0, 0, 0, 0, 2, x, y);
    else
        sweep(S, COLUMNS, 0, 0, 0, K, 0, 0, 0, 0, 1, x, y);
}

// Bring a state up to date with its path, in place, and copy it for its first readers.
static void open_state(float *S, ix by_row, float *to, ix K, ix n, const float *a, const float *const *k,
                       const float *const *u, int readers, const float *const *x, float (*y)[COLUMNS]) {
    if (n == 0 && readers == 2)
        sweep(S, by_row, to, COLUMNS, 0, K, 0, 0, 0, 0, 2, x, y);
    else if (n == 1 && readers == 2)
        sweep(S, by_row, to, COLUMNS, S, K, 1, a, k, u, 2, x, y);
    else if (readers == 2)
        sweep(S, by_row, to, COLUMNS, S, K, n, a, k, u, 2, x, y);
    else if (n == 0)
        sweep(S, by_row, to, COLUMNS, 0, K, 0, 0, 0, 0, 1, x, y);
    else
        sweep(S, by_row, to, COLUMNS, S, K, n, a, k, u, 1, x, y);
}

// MOST, the longest path and the widest window of tokens that are not certain, is defined on the compiler's command line.

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

typedef struct {
    const float *q, *k, *v, *decay, *beta;
    float *out;
    ix M, G, H, K, W;
    float *state;
    ix state_stride;
    const ix *slot;
    const records *r;
    const float *keys;
    const ix *path_slab, *path_place, *path_length;
    ix P;
    const ix *slab, *place, *snapshot;
    const uint8_t *above;
} scanning;

// One head of one row.
static void scan_head(const void *work, ix chunk, ix thread) {
    const scanning s = *(const scanning *)work;
    const records *r = s.r;
    ix M = s.M, G = s.G, H = s.H, K = s.K, W = s.W, P = s.P, b = chunk / H, h = chunk % H;
    ix g = h / (H / G), first = b * M, pending = s.path_length ? s.path_length[b] : 0, readers = s.beta ? 2 : 1;
    ix parent[M + 1], from[M + 1], to[M + 1];
    ix blocks = place_states(M, s.above ? s.above + first * M : 0, !s.place, parent, from, to), late[blocks];
    float held[blocks][K * COLUMNS] __attribute__((aligned(64))), u[M + 1][COLUMNS], path_u[MOST][COLUMNS];
    float kept[M + 1], self[M + 1], path_kept[MOST], found[2][COLUMNS];
    const float *path_k[MOST], *path_own[MOST];
    for (ix n = 0; n < pending; n++) {
        path_kept[n] = expf(r->decay[s.path_slab[b * P + n] * r->decay_slab +
                                     s.path_place[b * P + n] * r->decay_place + h]);
        path_k[n] = s.keys + ((b * P + n) * G + g) * K, path_own[n] = path_u[n];
    }
    for (ix m = 0; m < M; m++) {
        ix t = first + m;
        kept[m] = expf(s.decay[t * H + h]);
        self[m] = dot(s.q + (t * G + g) * K, s.k + (t * G + g) * K, K);
        if (s.place) r->decay[s.slab[t] * r->decay_slab + s.place[t] * r->decay_place + h] = s.decay[t * H + h];
    }
    for (ix c = 0; c < W; c += COLUMNS) {
        ix count = W - c < COLUMNS ? W - c : COLUMNS;
        float *S = s.state + s.slot[b] * s.state_stride + h * K * W + c;
        // Before this window's records, which may take the places of those that end here.
        for (ix n = 0; n < pending; n++)
            take_columns(path_u[n], r->update + s.path_slab[b * P + n] * r->update_slab +
                                        s.path_place[b * P + n] * r->update_place + h * W + c, 1, 0, count);
        for (ix i = 0; i < blocks; i++) late[i] = -1;  // the token that a block lacks
        if (M == 0 || count < COLUMNS) {
            take_columns(held[0], S, K, W, count);
            for (ix n = 0; n < pending; n++) add_token(held[0], held[0], K, path_kept[n], path_k[n], path_u[n]);
            if (pending) give_columns(S, held[0], K, W, count);
        }
        for (ix m = 0; m < M; m++) {
            ix t = first + m, block = from[m];
            const float *key = s.k + (t * G + g) * K, *x[2] = {s.q + (t * G + g) * K, key};
            float *above_it = held[block], a = kept[m], own = s.beta ? s.beta[t * H + h] : 0;
            if (m == 0 && count == COLUMNS)
                open_state(S, W, above_it, K, pending, path_kept, path_k, path_own, readers, x, found);
            else if (late[block] >= 0)
                add_and_read(above_it, K, kept[late[block]], s.k + ((first + late[block]) * G + g) * K, u[late[block]],
                             readers, x, found);
            else
                read_state(above_it, K, readers, x, found);
            late[block] = -1;
            take_columns(u[m], s.v + (t * H + h) * W + c, 1, 0, count);
            if (s.beta)
                for (ix w = 0; w < COLUMNS; w++) u[m][w] = own * (u[m][w] - a * found[1][w]);
            for (ix w = 0; w < COLUMNS; w++) found[0][w] = a * found[0][w] + self[m] * u[m][w];
            give_columns(s.out + (t * H + h) * W + c, found[0], 1, 0, count);
            if (s.place)
                give_columns(r->update + s.slab[t] * r->update_slab + s.place[t] * r->update_place + h * W + c, u[m], 1,
                             0, count);
            if (to[m] == block && !s.snapshot)
                late[block] = m;  // on the way of its reader
            else if (to[m] >= 0)
                add_token(above_it, held[to[m]], K, a, key, u[m]);
            if (s.snapshot)
                give_columns(s.state + s.snapshot[t] * s.state_stride + h * K * W + c, held[to[m]], K, W, count);
        }
        if (M == 0 || s.place || s.snapshot) continue;
        const float *key = s.k + ((first + M - 1) * G + g) * K, *own = u[M - 1];
        if (count == COLUMNS) {
            sweep(held[0], COLUMNS, S, W, 0, K, 1, &kept[M - 1], &key, &own, 0, 0, 0);
            continue;
        }
        add_token(held[0], held[0], K, kept[M - 1], key, own);
        give_columns(S, held[0], K, W, count);
    }
}

// The gated delta rule (beta given) or Mamba-2 (beta null) over a window of M tokens of each of B rows, token by
// token, so that what a token reads is the same in every window: S <- a S + k uᵀ with u = beta (v - a k S), o = q S.
// q, k [B*M, G, K], v and out [B*M, H, W], decay (a's logarithm) and beta [B*M, H], keys [B, P, G, K] of the pending
// path, which is added first. place and snapshot null: the tokens are certain and the states move on. Otherwise each
// leaves a record, or the state after it in a slot of its own; above[b, i, j] says whether j is above i or i itself.
// Heads are independent, and shared between threads.
void scan_window(const float *q, const float *k, const float *v, const float *decay, const float *beta, float *out, ix B,
           ix M, ix G, ix H, ix K, ix W, float *state, ix state_stride, const ix *slot, const records *r,
           const float *keys, const ix *path_slab, const ix *path_place, const ix *path_length, ix P,
           const ix *slab, const ix *place, const ix *snapshot, const uint8_t *above) {
    scanning work = {q, k, v, decay, beta, out, M, G, H, K, W, state, state_stride, slot, r, keys, path_slab, path_place,
                     path_length, P, slab, place, snapshot, above};
    share(scan_head, &work, B * H, B * H * K * W * (0.2 + 0.07 * (M + P)));
}

// to's rows <- from's rows, chosen by ids where there are any; distances in bytes.
void gather(const char *from, ix by_from, const ix *ids, ix rows, ix bytes, char *to, ix by_to) {
    for (ix r = 0; r < rows; r++) memcpy(to + r * by_to, from + (ids ? ids[r] : r) * by_from, bytes);
}

// Keys and values of each of B rows from P positions to others, in place; all of a row are read before any is written. A
// position's entries of one kind lie together, and so do a block's positions; distances in bytes.
void move(char *pages, ix by_block, ix by_kind, ix block, ix bytes, const ix *table, ix N, ix B, const ix *from,
          const ix *to, ix P) {
    char *held = workspace(2 * P * bytes);
    for (ix b = 0; b < B; b++, table += N, from += P, to += P)
        for (int written = 0; written < 2; written++)
            for (ix p = 0; p < P; p++) {
                if (from[p] == to[p]) continue;
                ix at = written ? to[p] : from[p];
                for (ix kind = 0; kind < 2; kind++) {
                    char *own = pages + table[at / block] * by_block + kind * by_kind + at % block * bytes;
                    char *spare = held + (2 * p + kind) * bytes;
                    memcpy(written ? own : spare, written ? spare : own, bytes);
                }
            }
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

// What an entry takes that passes an activation, a norm or a convolution.
#define POINTWISE_NS 0.7

#include "sampling.inc"
#include "tensors.inc"

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
#define READ_NS 0.03
#define MULTIPLY_NS (PAIRED ? 0.0105 : 0.34 / LANES)
#define INTEGER_NS 0.006
// To round a number to 8 bits.
#define ROUND_NS 0.1

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
