/* tests/standin/standin_nccl.cpp - NCCL for devices of one process, or of several on one machine:
 * collectives as meetings of streams.
 *
 * A call returns when its part is queued. It runs when every rank's part has come to the front of
 * its stream, so a rank that does not call, or waits for the others first, hangs here as it does on
 * GPUs. Parts that do not belong together stop the program. Sums go round the ring as NCCL's do:
 * the piece of rank r begins with rank r + 1, and BF16 sums are rounded at each hop. Processes meet
 * when the parts of all their ranks have, on a board (standin_board.cpp). What ranks
 * send each other within a group of calls is one meeting of all ranks: each has to take part, and a
 * message and its receiver to be of one size.
 *
 * STANDIN_NCCL_FAIL=N: call N of each communicator (from 1) never ends, and is an asynchronous
 * error, until the communicator is aborted. STANDIN_NCCL=apart: processes never find each other;
 * STANDIN_NCCL=network:NAMES: only where NCCL_SOCKET_IFNAME is NAMES at NCCL's first call;
 * STANDIN_NCCL=hang: no call ends, without an error;
 * STANDIN_NCCL=wrong: the last byte that a rank gets from others is wrong. */
#include "standin_nccl.h"

#include <cstdlib>
#include <map>
#include <string>

using namespace standin;

namespace standin {
const char *const operation_names[] = {"all-gather", "reduce-scatter", "all-reduce", "broadcast",
                                       "an exchange"};
} // namespace standin

namespace {
struct Team {
    std::mutex lock;
    int size = 0;
    uint64_t fails_at = 0;
    bool failed = false, aborted = false, wrong = false, hangs = false;
    struct Meet {
        std::shared_ptr<Call> call;
        std::shared_ptr<standin::Meeting> meeting;
    };
    std::map<uint64_t, Meet> open; /* by number, until every rank has called */
    std::vector<std::shared_ptr<standin::Meeting>> submitted;
    int local = 0;                /* ranks of this process */
    std::shared_ptr<Board> board; /* none: these are all */
};
} // namespace

struct ncclComm {
    std::shared_ptr<Team> team;
    int rank, device;
    uint64_t calls;
};

namespace {
thread_local int group_depth = 0;
thread_local std::vector<std::function<ncclResult_t()>> group_calls;
thread_local std::vector<Message> group_messages;
thread_local ncclResult_t group_error = ncclSuccess;

/* Communicators that are being made, where the caller wants them. */
struct Init {
    ncclComm_t *out;
    ncclComm *comm;
    ncclUniqueId id;
};
thread_local std::vector<Init> group_inits;

size_t bytes_of(ncclDataType_t type) {
    switch (type) {
    case ncclInt8:
    case ncclUint8:
        return 1;
    case ncclFloat16:
    case ncclBfloat16:
        return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
        return 4;
    default:
        return 8;
    }
}

/* Elements [first, first + count) of all ranks, beginning with rank `begin`. */
std::vector<char> ring_sum(const Call &c, size_t first, size_t count, int begin) {
    std::vector<char> out(count * bytes_of(c.type));
    for (size_t i = 0; i < count; i++) {
        float sum = 0.0f;
        for (int hop = 0; hop < c.ranks; hop++) {
            const void *in = c.in[(size_t)((begin + hop) % c.ranks)];
            if (c.type == ncclFloat32) {
                const float x = static_cast<const float *>(in)[first + i];
                sum = hop ? sum + x : x;
            } else {
                const float x = sw_f32_from_bf16(static_cast<const sw_bf16 *>(in)[first + i]);
                sum = hop ? sw_f32_from_bf16(sw_bf16_from_f32(sum + x)) : x;
            }
        }
        if (c.type == ncclFloat32)
            reinterpret_cast<float *>(out.data())[i] = sum;
        else
            reinterpret_cast<sw_bf16 *>(out.data())[i] = sw_bf16_from_f32(sum);
    }
    return out;
}

std::vector<Sent> sent_by(const Call &c, const Board *board, int rank) {
    std::vector<Sent> all;
    if (!c.is_here[(size_t)rank]) return board_sent(*board, rank);
    for (const Message &m : c.messages[(size_t)rank])
        if (m.is_sent) all.push_back({m.peer, static_cast<const char *>(m.at), m.bytes});
    return all;
}

/* The n-th message from one rank to another meets the n-th that this one expects of it. */
void deliver(const Call &c, const Board *board) {
    for (int to = 0; to < c.ranks; to++)
        for (int from = 0; from < c.ranks && c.is_here[(size_t)to]; from++) {
            std::vector<Sent> sent;
            std::vector<const Message *> awaited;
            for (const Sent &m : sent_by(c, board, from))
                if (m.peer == to) sent.push_back(m);
            for (const Message &m : c.messages[(size_t)to])
                if (!m.is_sent && m.peer == from) awaited.push_back(&m);
            if (sent.size() != awaited.size())
                standin::die("NCCL: rank %d sends %zu messages to rank %d, which expects %zu", from,
                             sent.size(), to, awaited.size());
            for (size_t i = 0; i < sent.size(); i++) {
                if (sent[i].bytes != awaited[i]->bytes)
                    standin::die("NCCL: rank %d sends %zu bytes to rank %d, which expects %zu",
                                 from, sent[i].bytes, to, awaited[i]->bytes);
                memcpy(awaited[i]->at, sent[i].at, sent[i].bytes);
            }
        }
}

/* What comes of a link that damages data: the last byte from another rank. */
void damage(const Call &c) {
    for (int r = 0; r < c.ranks; r++) {
        const size_t bytes = c.count * bytes_of(c.type);
        const size_t last = c.op == ALL_GATHER ? (size_t)(c.ranks - (r == c.ranks - 1)) : 1;
        if (c.op != EXCHANGE && bytes && c.is_here[(size_t)r])
            static_cast<char *>(c.out[(size_t)r])[last * bytes - 1] ^= 1;
        for (const Message &m : c.messages[(size_t)r])
            if (!m.is_sent && m.bytes) static_cast<char *>(m.at)[m.bytes - 1] ^= 1;
    }
}

/* Everything is read before anything is written: buffers may be in place. */
void run_call(const Call &c, const Board *board) {
    if (c.op == EXCHANGE) {
        deliver(c, board);
        return;
    }
    const size_t bytes = c.count * bytes_of(c.type);
    std::vector<std::vector<char>> results((size_t)c.ranks);
    for (int r = 0; r < c.ranks; r++) {
        std::vector<char> &to = results[(size_t)r];
        if (!c.is_here[(size_t)r]) continue;
        if (c.op == ALL_GATHER) {
            for (int from = 0; from < c.ranks; from++) {
                const char *in = static_cast<const char *>(c.in[(size_t)from]);
                to.insert(to.end(), in, in + bytes);
            }
        } else if (c.op == BROADCAST) {
            const char *in = static_cast<const char *>(c.in[(size_t)c.root]);
            to.assign(in, in + bytes);
        } else if (c.op == REDUCE_SCATTER) {
            to = ring_sum(c, (size_t)r * c.count, c.count, r + 1);
        } else {
            to = ring_sum(c, 0, c.count, 1);
        }
    }
    for (int r = 0; r < c.ranks; r++)
        if (c.is_here[(size_t)r])
            memcpy(c.out[(size_t)r], results[(size_t)r].data(), results[(size_t)r].size());
}

bool is_on(int device, const void *p, size_t bytes) {
    int found = -1;
    return bytes == 0 ||
           (standin::place_of(p, bytes, &found) == standin::DEVICE && found == device);
}

void set_up(Team &team, uint64_t number, const Call &mine, Team::Meet &meet) {
    const size_t ranks = (size_t)team.size;
    const bool never = number == team.fails_at || team.hangs;
    meet.call = std::make_shared<Call>(mine);
    meet.call->in.resize(ranks);
    meet.call->out.resize(ranks);
    meet.call->messages.assign(ranks, {});
    meet.call->is_here.assign(ranks, false);
    meet.meeting = std::make_shared<standin::Meeting>();
    meet.meeting->parts = (uint32_t)team.local + (never ? 1 : 0);
    meet.meeting->run = [call = meet.call, wrong = team.wrong, board = team.board, number] {
        if (board) board_take(*board, *call);
        run_call(*call, board.get());
        if (wrong) damage(*call);
        if (board) board_end(*board, number, *call);
    };
    team.failed |= number == team.fails_at;
    team.submitted.push_back(meet.meeting);
    if (!team.board) return;
    meet.meeting->may_begin = [board = team.board, number] {
        return board_may_begin(*board, number);
    };
    meet.meeting->begin = [board = team.board, number, call = meet.call] {
        board_begin(*board, number, *call);
    };
    meet.meeting->is_ready = [board = team.board, number] {
        return board_is_ready(*board, number);
    };
}

ncclResult_t join(ncclComm *comm, const Call &mine, const void *in, size_t in_bytes, void *out,
                  size_t out_bytes, cudaStream_t stream) {
    const std::shared_ptr<Team> team = comm->team;
    const standin::StreamPtr queue = standin::stream_of(stream);
    std::lock_guard<std::mutex> held(team->lock);
    if (team->aborted) return ncclInvalidUsage;
    if (!is_on(comm->device, in, in_bytes) || !is_on(comm->device, out, out_bytes) ||
        standin::stream_device(queue) != comm->device)
        return ncclInvalidArgument;
    const uint64_t number = ++comm->calls;
    Team::Meet &meet = team->open[number];
    if (!meet.call) set_up(*team, number, mine, meet);
    const Call &c = *meet.call;
    if (c.op != mine.op || c.count != mine.count || c.type != mine.type || c.root != mine.root)
        standin::die("NCCL: rank %d calls %s of %zu, another one %s of %zu", comm->rank,
                     operation_names[mine.op], mine.count, operation_names[c.op], c.count);
    meet.call->in[(size_t)comm->rank] = in;
    meet.call->out[(size_t)comm->rank] = out;
    meet.call->is_here[(size_t)comm->rank] = true;
    if (mine.op == EXCHANGE) meet.call->messages[(size_t)comm->rank] = mine.messages[0];
    const std::shared_ptr<standin::Meeting> meeting = meet.meeting;
    if (meeting->streams.size() + 1 == (size_t)team->local) team->open.erase(number);
    standin::not_for_the_first_time(operation_names[mine.op], comm, mine.op);
    standin::submit_part(queue, meeting);
    return ncclSuccess;
}

/* At once, or at the end of the group. */
ncclResult_t call(ncclComm *comm, Operation op, const void *in, void *out, size_t count,
                  ncclDataType_t type, int root, size_t in_count, size_t out_count,
                  cudaStream_t stream) {
    if (!comm) return ncclInvalidArgument;
    const size_t bytes = bytes_of(type);
    const Call mine = {op, count, type, root, comm->team->size, in_count * bytes, {}, {}, {}, {}};
    const auto go = [=] {
        return join(comm, mine, in, in_count * bytes, out, out_count * bytes, stream);
    };
    if (group_depth == 0) return go();
    group_calls.push_back(go);
    return ncclSuccess;
}

/* All that a rank sends and expects in one group of calls. */
ncclResult_t exchange(const std::vector<Message> &messages) {
    ncclComm *comm = messages[0].comm;
    for (const Message &m : messages)
        if (m.comm != comm || m.stream != messages[0].stream || m.peer < 0 ||
            m.peer >= comm->team->size || !is_on(comm->device, m.at, m.bytes))
            return ncclInvalidArgument;
    const Call mine = {EXCHANGE, 0, ncclUint8, 0, comm->team->size, 0, {}, {}, {messages}, {}};
    return join(comm, mine, nullptr, 0, nullptr, 0, messages[0].stream);
}

ncclResult_t message(const Message &m) {
    if (!m.comm) return ncclInvalidArgument;
    if (group_depth == 0) return exchange({m});
    group_messages.push_back(m);
    return ncclSuccess;
}

/* Of a call: remembered where the calls of a group are to be dropped for it. */
ncclResult_t refuse(ncclResult_t result) {
    if (group_depth > 0) group_error = result;
    return result;
}

thread_local int group_size = 0;

std::shared_ptr<Team> make_team(int size, int local) {
    auto team = std::make_shared<Team>();
    const char *fail = getenv("STANDIN_NCCL_FAIL"), *text = getenv("STANDIN_NCCL");
    const char *detour = getenv("NCCL_P2P_DISABLE");
    team->size = size;
    team->local = local;
    team->fails_at = fail ? strtoull(fail, nullptr, 10) : 0;
    team->wrong = (text && !strcmp(text, "wrong")) || (!detour && standin::peers_are("wrong"));
    team->hangs = (text && !strcmp(text, "hang")) || (!detour && standin::peers_are("hang"));
    return team;
}

/* NCCL looks for it once. */
const std::string &network() {
    static const char *const text = getenv("NCCL_SOCKET_IFNAME");
    static const auto &names = *new std::string(text ? text : "");
    return names;
}

bool processes_are_apart() {
    static const char wanted[] = "network:";
    const char *text = getenv("STANDIN_NCCL");
    if (!text || strncmp(text, wanted, sizeof(wanted) - 1) != 0)
        return text && !strcmp(text, "apart");
    return network() != text + sizeof(wanted) - 1;
}

/* The communicators of a group of calls, all of one name, when all ranks are there. */
ncclResult_t complete(int size, ncclResult_t result) {
    std::vector<Init> inits;
    inits.swap(group_inits);
    if (inits.empty()) return result;
    auto team = make_team(size, (int)inits.size());
    if (result == ncclSuccess && team->local < size)
        team->board = board_join(inits[0].id, size, team->local, processes_are_apart());
    else
        board_forget(inits[0].id);
    for (const Init &init : inits) {
        init.comm->team = team;
        if (result == ncclSuccess)
            *init.out = init.comm;
        else
            delete init.comm;
    }
    return result;
}

bool can_sum(ncclDataType_t type, ncclRedOp_t op) {
    return op == ncclSum && (type == ncclFloat32 || type == ncclBfloat16);
}
} // namespace

extern "C" {
ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}
const char *ncclGetErrorString(ncclResult_t result) {
    switch (result) {
    case ncclSuccess:
        return "no error";
    case ncclInvalidArgument:
        return "invalid argument";
    case ncclInvalidUsage:
        return "invalid usage";
    case ncclRemoteError:
        return "remote process exited or there was a network error";
    default:
        return "another error of NCCL";
    }
}
const char *ncclGetLastError(ncclComm_t) {
    return "";
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    AT_START(0);
    if (standin::is_told_to_fail(__func__)) return ncclSystemError;
    network();
    *id = board_name();
    return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t *out, int size, ncclUniqueId id, int rank) {
    AT_START(0);
    if (standin::is_told_to_fail(__func__)) return refuse(ncclSystemError);
    if (!out || size < 1 || rank < 0 || rank >= size) return refuse(ncclInvalidArgument);
    group_inits.push_back({out, new ncclComm{nullptr, rank, standin::current_device(), 0}, id});
    if (group_depth == 0) return complete(size, ncclSuccess);
    group_size = size;
    return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t) {
    return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    AT_START(0);
    standin::forget_object(comm);
    delete comm;
    return ncclSuccess;
}
/* Everything that is under way ends, on every rank, without having happened. */
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    {
        std::lock_guard<std::mutex> held(comm->team->lock);
        comm->team->aborted = true;
        for (const auto &meeting : comm->team->submitted) standin::abandon(meeting);
    }
    standin::forget_object(comm);
    delete comm;
    return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *result) {
    if (standin::is_told_to_fail(__func__)) return ncclInternalError;
    std::lock_guard<std::mutex> held(comm->team->lock);
    *result = comm->team->failed ? ncclRemoteError : ncclSuccess;
    return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) {
    *count = comm->team->size;
    return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
    *rank = comm->rank;
    return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) {
    *device = comm->device;
    return ncclSuccess;
}

ncclResult_t ncclGroupStart(void) {
    group_depth++;
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd(void) {
    if (group_depth == 0) return ncclInvalidUsage;
    if (--group_depth > 0) return ncclSuccess;
    std::vector<std::function<ncclResult_t()>> calls;
    std::vector<Message> messages;
    calls.swap(group_calls);
    messages.swap(group_messages);
    ncclResult_t first = group_error;
    group_error = ncclSuccess;
    if (first == ncclSuccess && standin::is_told_to_fail(__func__)) first = ncclUnhandledCudaError;
    first = complete(group_size, first);
    if (first != ncclSuccess) return first;
    if (!messages.empty()) first = exchange(messages);
    for (const auto &one : calls) {
        const ncclResult_t result = one();
        if (first == ncclSuccess) first = result;
    }
    return first;
}

ncclResult_t ncclSend(const void *at, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    if (standin::is_told_to_fail(__func__)) return refuse(ncclUnhandledCudaError);
    return message({comm, peer, true, const_cast<void *>(at), count * bytes_of(type), stream});
}
ncclResult_t ncclRecv(void *at, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    if (standin::is_told_to_fail(__func__)) return refuse(ncclUnhandledCudaError);
    return message({comm, peer, false, at, count * bytes_of(type), stream});
}

ncclResult_t ncclAllGather(const void *in, void *out, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
    if (standin::is_told_to_fail(__func__)) return ncclUnhandledCudaError;
    if (!comm) return ncclInvalidArgument;
    return call(comm, ALL_GATHER, in, out, count, type, 0, count, count * (size_t)comm->team->size,
                stream);
}
ncclResult_t ncclReduceScatter(const void *in, void *out, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    if (standin::is_told_to_fail(__func__)) return ncclUnhandledCudaError;
    if (!comm || !can_sum(type, op)) return ncclInvalidArgument;
    return call(comm, REDUCE_SCATTER, in, out, count, type, 0, count * (size_t)comm->team->size,
                count, stream);
}
ncclResult_t ncclAllReduce(const void *in, void *out, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    if (!can_sum(type, op)) return ncclInvalidArgument;
    return call(comm, ALL_REDUCE, in, out, count, type, 0, count, count, stream);
}
ncclResult_t ncclBroadcast(const void *in, void *out, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
    if (!comm || root < 0 || root >= comm->team->size) return ncclInvalidArgument;
    return call(comm, BROADCAST, in, out, count, type, root, comm->rank == root ? count : 0, count,
                stream);
}
}
