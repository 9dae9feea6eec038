// The operations of a narrow window, each in one call: what a decode step spends beside its matrix products
// is mostly the cost of calling. typed.inc is compiled once for each type that tensors may have.

#define _GNU_SOURCE  // for the affinity of threads
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef long ix;

#include "vectors.inc"
#include "pool.inc"
#include "workspace.inc"
#include "scalars.inc"

// MOST, the longest path and the widest window of tokens that are not certain, is defined on the compiler's command line.

// A recurrent layer's records: where its parts lie, and how far apart slabs and places are, in floats.
typedef struct {
    float *update, *decay;
    ix update_slab, update_place, decay_slab, decay_place;
} records;

#include "recurrence.inc"
#include "attention.inc"
#include "sampling.inc"
#include "tensors.inc"

// to's rows <- from's rows, chosen by ids where there are any; distances in bytes.
void gather(const char *from, ix by_from, const ix *ids, ix rows, ix bytes, char *to, ix by_to) {
    for (ix r = 0; r < rows; r++) memcpy(to + r * by_to, from + (ids ? ids[r] : r) * by_from, bytes);
}

// Keys and values of each of B rows from P positions to others, in place; all of a row are read before any is written. The
// entries of a head lie together, `bytes` of them; distances in bytes.
void move(char *pages, ix by_block, ix by_kind, ix by_place, ix by_head, ix kinds, ix heads, ix block, ix bytes,
          const ix *table, ix N, ix B, const ix *from, const ix *to, ix P) {
    char *held = workspace(kinds * heads * P * bytes);
    for (ix b = 0; b < B; b++, table += N, from += P, to += P)
        for (int written = 0; written < 2; written++) {
            char *spare = held;
            for (ix p = 0; p < P; p++) {
                if (from[p] == to[p]) continue;
                ix at = written ? to[p] : from[p];
                char *own = pages + table[at / block] * by_block + at % block * by_place;
                for (ix kind = 0; kind < kinds; kind++)
                    for (ix head = 0; head < heads; head++, spare += bytes) {
                        char *there = own + kind * by_kind + head * by_head;
                        memcpy(written ? there : spare, written ? spare : there, bytes);
                    }
            }
        }
}

// What an entry takes that passes an activation, a norm or a convolution.
#define POINTWISE_NS 0.7

// Of products: outputs that are laid out together, and panels that a thread takes at once.
#define PANEL 16
#define PANELS 4
// A matrix cut into fewer chunks than this splits unevenly: 192 outputs made 3 chunks for 2 threads. With it and six-row
// tiles, 5 rows of such matrices took 206 us in place of 251 (2 threads, AVX2). Chosen for 2 threads; not tuned for more.
#define EVEN_CHUNKS 6
#define PARTS (PANEL / LANES)
#define WIDEST (PANELS * PARTS)
// Rows of a tile, and panels of one with so many rows: as many as leave registers for weights and a row.
#if LANES == 16
#define ROWS 6
#define BESIDE(rows) 4
#elif LANES == 8
#define ROWS 6
#define BESIDE(rows) ((rows) == 1 ? 4 : (rows) == 2 ? 2 : 1)
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

#include "blocks.inc"
#include "integer.inc"

#define NAME(op) op##_float32
#define real float
#define LOAD(x) (x)
#define STORE(x) (x)
#define EXP(x) exp_(x)
#define WEIGHTS(panel, part, second, masked) load((panel) + (second) * PANEL + (part) * LANES)
#define PAIRED 0
#define operand float
#include "typed.inc"
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
#define WEIGHTS(panel, part, second, masked) load_half((panel) + 2 * (part) * LANES, second, masked)
#define PAIRED UNITS
#if PAIRED
#define operand uint16_t
#else
#define operand float
#endif
#include "typed.inc"
