/* Drives the CPU Adam from files, for adam_agrees.py.
 *
 *   adam_steps IN OUT COUNT STEPS LR BETA1 BETA2 EPS DECAY COUPLED SPLIT
 *
 * IN: COUNT masters, then COUNT gradients for each step; OUT: the masters after each step, then the
 * last momentum and variance. All FP32 in this machine's order. */
#include <stdio.h>
#include <stdlib.h>
#include "cpu_adam/adam.h"

int main(int argc, char **argv) {
    if (argc != 12) return 2;
    const uint64_t count = strtoull(argv[3], NULL, 10), steps = strtoull(argv[4], NULL, 10);
    const struct sw_adam_hyper hyper = {.lr = atof(argv[5]),
                                        .beta1 = atof(argv[6]),
                                        .beta2 = atof(argv[7]),
                                        .eps = atof(argv[8]),
                                        .weight_decay = atof(argv[9]),
                                        .coupled = atoi(argv[10])};
    float *x = malloc(count * sizeof(float)), *y = malloc(count * sizeof(float));
    const struct sw_adam_range all = {count, 1};
    struct sw_adam_chunk chunk = {.format = {atoi(argv[11]) ? SW_MASTER_SPLIT : SW_MASTER_FP32,
                                             SW_MOMENTS_FP32, SW_FP32, SW_BF16},
                                  .count = count,
                                  .ranges = &all,
                                  .range_count = 1,
                                  .grad = x};
    void *record = malloc(sw_adam_record_bytes(&chunk.format, count));
    FILE *in = fopen(argv[1], "rb"), *out = fopen(argv[2], "wb");
    const struct sw_adam_variant *variant;
    if (!x || !y || !record || !in || !out || sw_adam_pick(&variant)) return 1;
    sw_adam_record_map(&chunk, record);
    if (fread(x, sizeof(float), count, in) != count) return 1;
    sw_adam_start(&chunk, 0, count, x);
    for (uint64_t t = 1; t <= steps; t++) {
        struct sw_adam_step step;
        sw_adam_prepare(&step, &hyper, t, 1);
        if (fread(x, sizeof(float), count, in) != count) return 1;
        sw_adam_update(variant, &step, &chunk, 2, NULL);
        sw_adam_read(&chunk, 0, count, y, NULL, NULL);
        if (fwrite(y, sizeof(float), count, out) != count) return 1;
    }
    sw_adam_read(&chunk, 0, count, NULL, x, y);
    if (fwrite(x, sizeof(float), count, out) != count ||
        fwrite(y, sizeof(float), count, out) != count || fclose(out) != 0)
        return 1;
    fclose(in);
    free(record);
    free(x);
    free(y);
    return 0;
}
