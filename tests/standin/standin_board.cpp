/* tests/standin/standin_board.cpp - what ranks of several processes bring to a collective, in
 * memory that all have mapped: a file without a name, which the others open through the process
 * that made it. Each rank has a place of its own; pages are taken when something is written. */
#include "standin_nccl.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <map>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

namespace standin {
namespace {
constexpr size_t AREA_BYTES = (size_t)256 << 20, HEAD_BYTES = 4096, RANKS_MAX = 64;
static_assert(sizeof(std::atomic<uint64_t>) == 8, "one that processes share");

struct Head {
    std::atomic<uint64_t> joined;
    std::atomic<uint64_t> begun[RANKS_MAX], read[RANKS_MAX]; /* numbers of collectives */
};
static_assert(sizeof(Head) <= HEAD_BYTES, "the ranks' places begin behind it");

/* At the beginning of a rank's place; what it brings follows, in an exchange `messages` pieces. */
struct Brought {
    uint64_t op, count, type, root, bytes, messages;
};
struct Piece {
    int64_t peer;
    uint64_t bytes;
};

/* What ncclUniqueId holds here. */
struct Name {
    int64_t pid, fd, number;
};

auto &lock = *new std::mutex;
auto &made = *new std::map<int64_t, int>; /* descriptors of names that nobody has joined here */
} // namespace

class Board {
  public:
    char *base;
    size_t bytes;
    int size;
    Head &head() const { return *reinterpret_cast<Head *>(base); }
    char *place(int rank) const { return base + HEAD_BYTES + (size_t)rank * AREA_BYTES; }
    const Brought &brought(int rank) const { return *reinterpret_cast<Brought *>(place(rank)); }
    ~Board() { munmap(base, bytes); }
};

ncclUniqueId board_name() {
    static int64_t numbers = 0;
    std::lock_guard<std::mutex> held(lock);
    const int fd = memfd_create("standin", MFD_CLOEXEC);
    if (fd < 0) die("NCCL: no memory for several processes");
    const Name name = {getpid(), fd, ++numbers};
    made[name.number] = fd;
    ncclUniqueId id = {};
    memcpy(&id, &name, sizeof(name));
    return id;
}

void board_forget(const ncclUniqueId &id) {
    Name name;
    memcpy(&name, &id, sizeof(name));
    std::lock_guard<std::mutex> held(lock);
    if (name.pid != getpid() || !made.count(name.number)) return;
    close(made[name.number]);
    made.erase(name.number);
}

std::shared_ptr<Board> board_join(const ncclUniqueId &id, int size, int local, bool are_apart) {
    Name name;
    char path[64];
    memcpy(&name, &id, sizeof(name));
    snprintf(path, sizeof(path), "/proc/%lld/fd/%lld", (long long)name.pid, (long long)name.fd);
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    auto board = std::make_shared<Board>();
    board->size = size;
    board->bytes = HEAD_BYTES + (size_t)size * AREA_BYTES;
    if (fd < 0 || (size_t)size > RANKS_MAX || ftruncate(fd, (off_t)board->bytes) < 0)
        die("NCCL: the process that named a communicator is not there");
    void *base =
        mmap(nullptr, board->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (base == MAP_FAILED) die("NCCL: memory for %d ranks cannot be mapped", size);
    close(fd);
    board->base = static_cast<char *>(base);
    board->head().joined += (uint64_t)local;
    while (are_apart || board->head().joined < (uint64_t)size)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    board_forget(id);
    return board;
}

bool board_may_begin(const Board &board, uint64_t number) {
    for (int r = 0; r < board.size; r++)
        if (board.head().read[r] + 1 < number) return false;
    return true;
}

namespace {
void put(char *&at, const char *end, const void *data, size_t bytes) {
    if (bytes > (size_t)(end - at)) die("NCCL: more than several processes have room for");
    if (bytes) memcpy(at, data, bytes);
    at += bytes;
}
} // namespace

void board_begin(Board &board, uint64_t number, const Call &c) {
    for (int r = 0; r < c.ranks; r++) {
        if (!c.is_here[(size_t)r]) continue;
        char *at = board.place(r);
        const char *end = at + AREA_BYTES;
        Brought mine = {(uint64_t)c.op, c.count, (uint64_t)c.type, (uint64_t)c.root, c.in_bytes, 0};
        for (const Message &m : c.messages[(size_t)r]) mine.messages += m.is_sent;
        put(at, end, &mine, sizeof(mine));
        if (c.op != BROADCAST || r == c.root) put(at, end, c.in[(size_t)r], c.in_bytes);
        for (const Message &m : c.messages[(size_t)r]) {
            const Piece piece = {m.peer, m.bytes};
            if (!m.is_sent) continue;
            put(at, end, &piece, sizeof(piece));
            put(at, end, m.at, m.bytes);
        }
        board.head().begun[r] = number;
    }
}

bool board_is_ready(const Board &board, uint64_t number) {
    for (int r = 0; r < board.size; r++)
        if (board.head().begun[r] < number) return false;
    return true;
}

void board_take(const Board &board, Call &c) {
    for (int r = 0; r < c.ranks; r++) {
        const Brought &b = board.brought(r);
        if (b.op != (uint64_t)c.op || b.count != c.count || b.type != (uint64_t)c.type ||
            b.root != (uint64_t)c.root)
            die("NCCL: rank %d, of another process, calls %s of %zu, a rank here %s of %zu", r,
                operation_names[b.op], (size_t)b.count, operation_names[c.op], c.count);
        if (!c.is_here[(size_t)r]) c.in[(size_t)r] = board.place(r) + sizeof(Brought);
    }
}

std::vector<Sent> board_sent(const Board &board, int rank) {
    std::vector<Sent> all;
    const char *at = board.place(rank) + sizeof(Brought) + board.brought(rank).bytes;
    for (uint64_t i = 0; i < board.brought(rank).messages; i++) {
        Piece piece;
        memcpy(&piece, at, sizeof(piece));
        at += sizeof(piece);
        all.push_back({(int)piece.peer, at, (size_t)piece.bytes});
        at += piece.bytes;
    }
    return all;
}

void board_end(Board &board, uint64_t number, const Call &c) {
    for (int r = 0; r < c.ranks; r++)
        if (c.is_here[(size_t)r]) board.head().read[r] = number;
}
} // namespace standin
