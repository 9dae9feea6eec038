// AMX in plain C, in place of the compiler's, for processors without: included before the C forms by -include. What a
// processor would stop at ends the program: tiles of no shape or of shapes that do not fit, and units not asked for.

#define _GNU_SOURCE
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define __AMX_INT8__ 1
#define TILES 8
#ifndef ROW_BYTE
#define ROW_BYTE int8_t
#endif

static int granted;
static _Thread_local struct {
    uint8_t palette;
    uint16_t row_bytes[TILES];
    uint8_t rows[TILES];
    uint8_t data[TILES][16][64];
} tiles;

static void must(int right, const char *what) {
    if (right) return;
    fprintf(stderr, "AMX: %s\n", what);
    exit(3);
}

static int shaped(int t) { return tiles.palette == 1 && tiles.rows[t] && tiles.row_bytes[t]; }

static void load_config(const void *from) {
    const uint8_t *at = from;
    must(granted, "not asked for");
    must(at[0] == 1, "no palette");
    memset(&tiles, 0, sizeof tiles);
    tiles.palette = at[0];
    memcpy(tiles.row_bytes, at + 16, sizeof tiles.row_bytes);
    memcpy(tiles.rows, at + 48, sizeof tiles.rows);
    for (int t = 0; t < TILES; t++) must(tiles.row_bytes[t] <= 64 && tiles.rows[t] <= 16, "too large a tile");
    for (int t = 0; t < TILES; t++) must(!tiles.rows[t] == !tiles.row_bytes[t], "a tile of rows or bytes alone");
    for (int i = 2; i < 16; i++) must(at[i] == 0, "something in what is reserved");
}

static void load_tile(int t, const void *from, long apart) {
    must(shaped(t), "loads a tile without a shape");
    memset(tiles.data[t], 0, sizeof tiles.data[t]);
    for (int r = 0; r < tiles.rows[t]; r++) memcpy(tiles.data[t][r], (const char *)from + r * apart, tiles.row_bytes[t]);
}

static void store_tile(int t, void *to, long apart) {
    must(shaped(t), "stores a tile without a shape");
    for (int r = 0; r < tiles.rows[t]; r++) memcpy((char *)to + r * apart, tiles.data[t][r], tiles.row_bytes[t]);
}

static void zero_tile(int t) {
    must(shaped(t), "clears a tile without a shape");
    memset(tiles.data[t], 0, sizeof tiles.data[t]);
}

// sum += a b, of signed bytes and unsigned ones, four beside each other.
static void multiply_tiles(int sum, int a, int b) {
    must(shaped(sum) && shaped(a) && shaped(b), "multiplies a tile without a shape");
    must(sum != a && sum != b && a != b, "multiplies a tile with itself");
    must(tiles.rows[sum] == tiles.rows[a] && tiles.row_bytes[sum] == tiles.row_bytes[b] &&
             tiles.row_bytes[a] == 4 * tiles.rows[b], "multiplies shapes that do not fit");
    for (int r = 0; r < tiles.rows[sum]; r++)
        for (int n = 0; n < tiles.row_bytes[sum] / 4; n++) {
            int32_t own;
            memcpy(&own, tiles.data[sum][r] + 4 * n, 4);
            for (int k = 0; k < tiles.row_bytes[a]; k++)
                own += (ROW_BYTE)tiles.data[a][r][k] * (int32_t)tiles.data[b][k / 4][4 * n + k % 4];
            memcpy(tiles.data[sum][r] + 4 * n, &own, 4);
        }
}

static float from_pair(const uint8_t *at) {
    uint32_t wide = (uint32_t)at[1] << 24 | (uint32_t)at[0] << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return x;
}

// sum += a b, of pairs of bfloat16: their first and their second entries have a sum each.
static void multiply_pair_tiles(int sum, int a, int b) {
    must(shaped(sum) && shaped(a) && shaped(b), "multiplies a tile without a shape");
    must(sum != a && sum != b && a != b, "multiplies a tile with itself");
    must(tiles.rows[sum] == tiles.rows[a] && tiles.row_bytes[sum] == tiles.row_bytes[b] &&
             tiles.row_bytes[a] == 4 * tiles.rows[b], "multiplies shapes that do not fit");
    for (int r = 0; r < tiles.rows[sum]; r++)
        for (int n = 0; n < tiles.row_bytes[sum]; n += 4) {
            float own, of[2] = {0};
            for (int k = 0; k < tiles.row_bytes[a]; k += 2)
                of[k / 2 % 2] = fmaf(from_pair(tiles.data[a][r] + k), from_pair(tiles.data[b][k / 4] + n + k % 4), of[k / 2 % 2]);
            memcpy(&own, tiles.data[sum][r] + n, 4);
            own += of[0] + of[1];
            memcpy(tiles.data[sum][r] + n, &own, 4);
        }
}

static long ask_system(long request, long unit) {
    must(request == 0x1023 && unit == 18, "asks for something else");
#ifdef REFUSED
    return -1;
#else
    granted = 1;
    return 0;
#endif
}
// The other system call is the one that threads sleep and wake by.
#define syscall(number, first, second, ...)                            \
    ((number) == SYS_arch_prctl ? ask_system((long)(first), (long)(second)) \
                                : (syscall)(number, first, second, ##__VA_ARGS__))

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) load_config(from)
#define _tile_release() ((void)memset(&tiles, 0, sizeof tiles))
#define _tile_loadd(t, from, apart) load_tile(t, from, apart)
#define _tile_stored(t, to, apart) store_tile(t, to, apart)
#define _tile_zero(t) zero_tile(t)
#define _tile_dpbsud(sum, a, b) multiply_tiles(sum, a, b)
#define _tile_dpbf16ps(sum, a, b) multiply_pair_tiles(sum, a, b)
