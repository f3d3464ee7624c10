/* tests/standin/standin_nccl.h - a call of NCCL's, and the board on which processes that take part
 * in it leave what they bring. */
#ifndef TESTS_STANDIN_STANDIN_NCCL_H
#define TESTS_STANDIN_STANDIN_NCCL_H
#include <nccl.h>

#include "standin_internal.h"

namespace standin {
enum Operation { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, EXCHANGE };
extern const char *const operation_names[];

/* A message of a rank, or one that it expects. */
struct Message {
    ncclComm *comm;
    int peer;
    bool is_sent;
    void *at;
    size_t bytes;
    cudaStream_t stream;
};

/* in, out, messages: by rank; of ranks in other processes only `in`, once they have begun. */
struct Call {
    Operation op;
    size_t count;
    ncclDataType_t type;
    int root, ranks;
    size_t in_bytes; /* of a rank */
    std::vector<const void *> in;
    std::vector<void *> out;
    std::vector<std::vector<Message>> messages; /* EXCHANGE */
    std::vector<bool> is_here;
};

/* What a rank sends in an exchange. */
struct Sent {
    int peer;
    const char *at;
    size_t bytes;
};

/* Memory of all processes of a communicator, made by the one that named it, and gone with it.
 * Collective n (from 1) may begin when all ranks have read what n - 1 was given. */
class Board;
ncclUniqueId board_name();
void board_forget(const ncclUniqueId &name); /* nobody else takes part */
/* Waits until all `size` ranks have joined, as many from here as `local`; for ever where the
 * processes are apart. */
std::shared_ptr<Board> board_join(const ncclUniqueId &name, int size, int local, bool are_apart);
bool board_may_begin(const Board &board, uint64_t number);
void board_begin(Board &board, uint64_t number, const Call &call); /* the ranks that are here */
bool board_is_ready(const Board &board, uint64_t number);
/* Fills in the other ranks' `in`; they call the same, or the program stops. */
void board_take(const Board &board, Call &call);
std::vector<Sent> board_sent(const Board &board, int rank);
void board_end(Board &board, uint64_t number, const Call &call);
} // namespace standin

#endif
