/* nvme/commit.h - the durable record that says which home of every chunk is the committed one.
 *
 * A journal is one file, FOLDER/NAME.commit, with two places of equal size. Commit number n goes to
 * place n mod 2, so the place of commit n - 1 stays as it was whatever happens meanwhile: a kill, a
 * torn write or a power cut leaves one whole record at least. A record is one header page, one
 * entry per chunk, and a checksum over both; docs/store-format.md has every field. The caller makes
 * the chunks themselves durable first (sw_nvme_sync). Threads: one at a time.
 * Errors: 0 or -errno, reported with the file. */
#ifndef NVME_COMMIT_H
#define NVME_COMMIT_H
#include <stdint.h>

/* A chunk's home in an entry. VIRGIN: never written, its state is the model's weights and 0. */
enum { SW_HOME_VIRGIN = 2 };

enum { SW_COMMIT_IDENTITY_BYTES = 3072, SW_COMMIT_NOTE_BYTES = 512 };

struct sw_commit_entry {
    uint32_t checksum; /* CRC-32C of the record's bytes in that home; 0 when virgin */
    uint32_t home;     /* 0, 1 or SW_HOME_VIRGIN */
};

struct sw_commit {
    uint64_t number; /* set by append: 1, 2, ... */
    uint64_t step;   /* steps done; data position follows from it */
    uint64_t updates;
    uint64_t skips_in_a_row;
    uint64_t owner_pid;
    uint64_t time_unix_s;
    uint64_t run;                /* drawn when the run began and kept by resumes: this run alone */
    uint32_t process, processes; /* which of the run's processes it is of, from 0; how many */
    /* What the run is: lines "name=value\n", all of which a resume has to match. */
    char identity[SW_COMMIT_IDENTITY_BYTES];
    char note[SW_COMMIT_NOTE_BYTES]; /* likewise, and no resume has to match them */
    uint32_t chunk_count;
    struct sw_commit_entry *entries; /* chunk_count, the caller's */
};

#define SW_STORE_NAME "optimizer" /* of an optimizer's store */

struct sw_journal;

/* Opens or makes the journal of a store with chunk_count chunks; nothing is written before the
 * first append. `fresh`: whatever it held is dropped. */
int sw_journal_open(struct sw_journal **out, const char *folder, const char *name,
                    uint32_t chunk_count, int fresh);
void sw_journal_close(struct sw_journal *journal, int unlink_file); /* NULL is fine */
uint64_t sw_journal_place_bytes(const struct sw_journal *journal);  /* that a commit writes */

/* Writes the record as number (last + 1) and makes it durable. */
int sw_journal_append(struct sw_journal *journal, struct sw_commit *commit);

/* Reads the newest whole record of FOLDER/NAME.commit without opening it for writing. 1: there is
 * one, and the caller frees commit->entries; 0: none (no file, or no whole record);
 * -EPROTONOSUPPORT: none but of another version of the format. */
int sw_commit_read(const char *folder, const char *name, struct sw_commit *commit);

/* The same of the records of steps up to `step_max`: where several stores are committed together,
 * one may be a commit ahead of the others. */
int sw_commit_read_until(const char *folder, const char *name, uint64_t step_max,
                         struct sw_commit *commit);

/* Drops the records of steps after `step`, durably. The record of `step` is the one before them,
 * untouched. */
int sw_commit_rewind(const char *folder, const char *name, uint64_t step);

/* Removes FOLDER/NAME.commit; fine when it is absent. */
void sw_commit_remove(const char *folder, const char *name);

/* The first line of `have` that differs from `want`'s line of the same name: its name's length in
 * *length and a pointer to it, or NULL. */
const char *sw_commit_differs(const char *want, const char *have, int *length);

/* What follows "name=" in an identity, up to the line's end; "" where there is no such line. */
const char *sw_commit_value(const char *identity, const char *name, int length);

#endif
