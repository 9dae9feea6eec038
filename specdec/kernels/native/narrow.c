// Operations of a narrow window, each in one call: apart from matrix products, a decode step is mostly call overhead.
// typed.inc is compiled once per tensor type.

#define _GNU_SOURCE  // for thread affinity
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

// MOST, the limit of path lengths and of speculative window widths, is defined on the compiler's command line.

// A recurrent layer's records: the addresses of their parts, and the strides of slabs and indices, in floats.
typedef struct {
    float *update, *decay;
    ix update_slab, update_index, decay_slab, decay_index;
} records;

#include "recurrence.inc"
#include "attention.inc"
#include "sampling.inc"
#include "tensors.inc"

// to's rows <- from's rows, selected by ids unless null; strides in bytes.
void gather(const char *from, ix by_from, const ix *ids, ix rows, ix bytes, char *to, ix by_to) {
    for (ix r = 0; r < rows; r++) memcpy(to + r * by_to, from + (ids ? ids[r] : r) * by_from, bytes);
}

// Move keys and values of each of B rows from P positions to others, in place. All of a row are read before any is
// written. A head's entries are adjacent, `bytes` bytes of them; strides in bytes.
void move(char *pages, ix by_block, ix by_kind, ix by_position, ix by_head, ix kinds, ix heads, ix block, ix bytes,
          const ix *table, ix N, ix B, const ix *from, const ix *to, ix P) {
    char *held = workspace(kinds * heads * P * bytes);
    for (ix b = 0; b < B; b++, table += N, from += P, to += P)
        for (int written = 0; written < 2; written++) {
            char *spare = held;
            for (ix p = 0; p < P; p++) {
                if (from[p] == to[p]) continue;
                ix at = written ? to[p] : from[p];
                char *own = pages + table[at / block] * by_block + at % block * by_position;
                for (ix kind = 0; kind < kinds; kind++)
                    for (ix head = 0; head < heads; head++, spare += bytes) {
                        char *there = own + kind * by_kind + head * by_head;
                        memcpy(written ? there : spare, written ? spare : there, bytes);
                    }
            }
        }
}

// Estimated time per entry of an activation, a norm or a convolution.
#define POINTWISE_NS 0.7

// PANEL: outputs stored together. PANELS: panels per chunk of work.
#define PANEL 16
#define PANELS 4
// A matrix cut into fewer chunks than this splits unevenly: 192 outputs made 3 chunks for 2 threads. With it and six-row
// tiles, 5 rows of such matrices took 206 us in place of 251 (2 threads, AVX2). Chosen for 2 threads; not tuned for more.
#define EVEN_CHUNKS 6
#define PARTS (PANEL / LANES)
#define WIDEST (PANELS * PARTS)
// ROWS: rows of a tile. BESIDE(rows): panels of a tile, as many as leave registers for weights and a row.
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
// Estimated time of a thread to read a byte of weights, and to multiply a weight with a row.
#define READ_NS 0.03
#define MULTIPLY_NS (PAIRED ? 0.0105 : 0.34 / LANES)
#define INTEGER_NS 0.006
// Estimated time to round a number to 8 bits.
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
