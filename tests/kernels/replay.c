// Appended to the C forms: makes calls on a memory image that a file holds, and writes the image as they leave it.
// The file: three counts, of the image's bytes, of words and of addresses; then these. Words are what `replay` takes;
// an address names a word that counts from the image's start.

#include <stdio.h>
#include <stdlib.h>

static void *take(FILE *from, ix bytes) {
    void *to = aligned_alloc(64, (bytes + 64) / 64 * 64);
    if (!to || fread(to, 1, bytes, from) != (size_t)bytes) exit(1);
    return to;
}

int main(int count, char **names) {
    FILE *from = count == 3 ? fopen(names[1], "rb") : 0, *to = from ? fopen(names[2], "wb") : 0;
    if (!to) return 1;
    ix *counts = take(from, 3 * sizeof *counts);
    char *image = take(from, counts[0]);
    ix *words = take(from, counts[1] * sizeof *words), *addresses = take(from, counts[2] * sizeof *addresses);
    for (ix i = 0; i < counts[2]; i++) words[addresses[i]] += (ix)image;
    replay(words, words + counts[1]);
    printf("%s, %s, bfloat16 units %d\n", vectors(), integers(), multiplies_pairs());
    return fwrite(image, 1, counts[0], to) != (size_t)counts[0] || fclose(to);
}
