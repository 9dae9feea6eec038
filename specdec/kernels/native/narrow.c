// The operations of a narrow window, each in one call: what a decode step spends beside its matrix products
// is mostly the cost of calling. narrow.inc is compiled once for each type that tensors may have.

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef long ix;

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

// S <- scale S + sum_n k_n u_n, each record weighted.
static void fold_state(float *S, ix K, ix W, float scale, ix count, const float *const *k, const float *const *u,
                       const float *weight) {
    for (ix i = 0; i < K * W; i++) S[i] *= scale;
    for (ix n = 0; n < count; n++)
        for (ix i = 0; i < K; i++) {
            float ki = k[n][i] * weight[n];
            for (ix w = 0; w < W; w++) S[i * W + w] += ki * u[n][w];
        }
}

// MOST, the longest path and the widest window, is defined by whoever compiles this.

// A recurrent layer's records: where its parts lie, and how far apart slabs and places are, in floats.
typedef struct {
    float *update, *decay;
    ix update_slab, update_place, decay_slab, decay_place;
} records;

// Each record holds its own log-decay; what follows a record on the path is summed from the path's end. keys
// [count, G, K].
static void fold_head(float *S, const records *r, const float *keys, ix G, ix H, ix K, ix W, ix h, const ix *slab,
                      const ix *place, ix count) {
    const float *k[MOST], *u[MOST];
    float weight[MOST], after = 0;
    for (ix n = count - 1; n >= 0; n--) {
        k[n] = keys + (n * G + h / (H / G)) * K;
        u[n] = r->update + slab[n] * r->update_slab + place[n] * r->update_place + h * W;
        weight[n] = expf(after);
        after += r->decay[slab[n] * r->decay_slab + place[n] * r->decay_place + h];
    }
    fold_state(S, K, W, expf(after), count, k, u, weight);
}

static inline float dot(const float *a, const float *b, ix n) {
    float sum = 0;
    for (ix i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

// One token of one head: the state behind `from` goes to `to`, which may be the same; beta null is Mamba-2. Inlined,
// so that the compiler sees where they are the same and need not ask whether they overlap.
static inline __attribute__((always_inline)) void advance(const float *from, float *to, const float *q,
                                                          const float *k, const float *v, float decay,
                                                          const float *beta, float *o, ix K, ix W) {
    float a = expf(decay), u[W];
    if (beta) {
        memset(u, 0, sizeof u);
        for (ix i = 0; i < K; i++)
            for (ix w = 0; w < W; w++) u[w] += k[i] * from[i * W + w];
        for (ix w = 0; w < W; w++) u[w] = *beta * (v[w] - a * u[w]);
    } else
        memcpy(u, v, sizeof u);
    memset(o, 0, W * sizeof *o);
    for (ix i = 0; i < K; i++)
        for (ix w = 0; w < W; w++) {
            float s = a * from[i * W + w] + k[i] * u[w];
            to[i * W + w] = s;
            o[w] += q[i] * s;
        }
}

// The gated delta rule (beta given) or Mamba-2 (beta null) over a window of M tokens of each of B rows.
// q, k [B*M, G, K], v and out [B*M, H, W], decay and beta [B*M, H], keys [B, P, G, K] of the pending path. place and
// snapshot null: the tokens are certain and the states move on. Otherwise each leaves a record, or the state after
// it in a slot of its own; above[b, i, j] says whether j is above i or i itself.
void recur(const float *q, const float *k, const float *v, const float *decay, const float *beta, float *out, ix B,
           ix M, ix G, ix H, ix K, ix W, float *state, ix state_stride, const ix *slot, const records *r,
           const float *keys, const ix *path_slab, const ix *path_place, const ix *path_length, ix P,
           const ix *slab, const ix *place, const ix *snapshot, const uint8_t *above) {
    for (ix b = 0; b < B; b++)
        for (ix h = 0; h < H; h++) {
            ix g = h / (H / G);
            float *S = state + slot[b] * state_stride + h * K * W;
            if (path_length && path_length[b])
                fold_head(S, r, keys + b * P * G * K, G, H, K, W, h, path_slab + b * P, path_place + b * P,
                          path_length[b]);
            if (!place) {
                for (ix m = 0; m < M; m++) {
                    ix t = b * M + m, parent = m - 1;
                    const float *kt = k + (t * G + g) * K, *qt = q + (t * G + g) * K, *vt = v + (t * H + h) * W;
                    const float *strength = beta ? beta + t * H + h : 0;
                    float *o = out + (t * H + h) * W;
                    if (!snapshot) {
                        advance(S, S, qt, kt, vt, decay[t * H + h], strength, o, K, W);
                        continue;
                    }
                    while (above && parent >= 0 && !above[t * M + parent]) parent--;
                    const float *from = parent < 0 ? S : state + snapshot[b * M + parent] * state_stride + h * K * W;
                    advance(from, state + snapshot[t] * state_stride + h * K * W, qt, kt, vt, decay[t * H + h],
                            strength, o, K, W);
                }
                continue;
            }
            double path[MOST];
            for (ix m = 0; m < M; m++) {
                ix t = b * M + m, at = slab[t] * r->update_slab + place[t] * r->update_place + h * W;
                const float *kt = k + (t * G + g) * K, *qt = q + (t * G + g) * K, *vt = v + (t * H + h) * W;
                const uint8_t *row = above ? above + t * M : 0;
                float *o = out + (t * H + h) * W, *u = r->update + at;
                path[m] = 0;
                for (ix j = 0; j <= m; j++)
                    if (!row || row[j]) path[m] += decay[(b * M + j) * H + h];
                float a = expf((float)path[m]);
                memset(o, 0, W * sizeof *o);
                memset(u, 0, W * sizeof *u);
                for (ix i = 0; i < K; i++)
                    for (ix w = 0; w < W; w++) {
                        o[w] += qt[i] * S[i * W + w];
                        u[w] += kt[i] * S[i * W + w];
                    }
                for (ix w = 0; w < W; w++) {
                    o[w] *= a;
                    u[w] *= a;
                }
                for (ix j = 0; j < m; j++) {
                    if (row && !row[j]) continue;
                    ix s = b * M + j;
                    const float *kj = k + (s * G + g) * K;
                    const float *uj = r->update + slab[s] * r->update_slab + place[s] * r->update_place + h * W;
                    float between = expf((float)(path[m] - path[j]));
                    float read = between * dot(qt, kj, K), error = between * dot(kt, kj, K);
                    for (ix w = 0; w < W; w++) {
                        o[w] += read * uj[w];
                        u[w] += error * uj[w];
                    }
                }
                if (beta)
                    for (ix w = 0; w < W; w++) u[w] = beta[t * H + h] * (vt[w] - u[w]);
                else
                    memcpy(u, vt, W * sizeof *u);
                float own = dot(qt, kt, K);
                for (ix w = 0; w < W; w++) o[w] += own * u[w];
                r->decay[slab[t] * r->decay_slab + place[t] * r->decay_place + h] = decay[t * H + h];
            }
        }
}

#define NAME(op) op##_float32
#define real float
#define LOAD(x) (x)
#define STORE(x) (x)
#define EXP(x) exp_(x)
#include "narrow.inc"
#undef NAME
#undef real
#undef LOAD
#undef STORE
#undef EXP

#define NAME(op) op##_bfloat16
#define real uint16_t
#define LOAD(x) from_bf16(x)
#define STORE(x) to_bf16(x)
#define EXP(x) exp_rough(x)
#include "narrow.inc"
