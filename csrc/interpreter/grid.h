// Grids of CTAs on the CPU: warps as fibers under a seeded scheduler, asynchronous engines that finish when it says so,
// and the memory they share with everything that is known about it.
//
// One Grid runs the launches of one or several devices, which reach each other's global memory. Whatever is wrong with
// a kernel ends it with a KernelError that says where.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <source_location>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/launch.h"
#include "interpreter/clock.h"
#include "interpreter/fiber.h"
#include "interpreter/shadow.h"
#include "interpreter/sites.h"

namespace mxmoe::interpreter {

constexpr int kLanes = 32, kTmemLanes = 128, kTmemColumns = 512;
constexpr size_t kSharedBytes = 227 * 1024;
constexpr uint32_t kPollSteps = 1 << 14;      // some milliseconds
constexpr uint32_t kClusterWindow = 1 << 24;  // addresses of rank r's shared memory in the cluster start at r + 1 of it

// kind: "race", "uninitialised", "out of bounds", "deadlock", "barrier", "tensor memory", "descriptor", "copy".
struct KernelError : std::runtime_error {
  KernelError(std::string k, const std::string& what) : std::runtime_error(k + ": " + what), kind(std::move(k)) {}
  std::string kind;
};

// Global memory that a kernel may touch.
struct Buffer {
  std::string name;
  void* data;
  size_t num_bytes;
  cuda::Use use;
};

struct Warp;

// A kernel on a device. It begins when the launch before it that has the number `after` (-1: none) is over.
struct Launch {
  std::string kernel;
  int device, after;
  int num_ctas, warps_per_cta, cluster_ctas;
  size_t shared_bytes;
  std::vector<Buffer> buffers;
  std::function<void(Warp&)> body;
};

struct Options {
  uint64_t seed = 0;
  int num_sms = 2;           // CTAs of a launch that run at the same time, or one cluster
  std::string mutant_site;   // label of the one call that is done wrongly,
  std::string mutant;        // and how; see Op
  void (*poll)() = nullptr;  // called now and then; what it throws ends the run
};

struct Barrier {
  bool initialised = false;
  int count = 0, pending = 0;
  int64_t bytes = 0;  // still to come
  uint32_t parity = 0;
  int64_t phases = 0;  // completed
  uint32_t init_record = 0;
  Clock arriving, arriving_async;                                                          // of this phase
  Clock completed, completed_async;                                                        // of all phases before it
  Clock arriving_remote, arriving_remote_async, completed_remote, completed_remote_async;  // by warps of other CTAs
};

struct Cta;
struct WarpState;

// Where the warps of a CTA, or of a cluster, wait for each other.
struct Rendezvous {
  int live = 0, arrived = 0;
  int64_t generation = 0;
  Clock arriving, arriving_async, completed, completed_async;
  void arrive(const WarpState& w);
  void complete();  // if all have arrived
};

struct Cluster {
  std::vector<Cta*> ctas;
  Rendezvous barrier;
};

// What a warp waits for, and how a report of a deadlock says it.
struct Wait {
  uint32_t site = 0;
  std::function<bool()> ready;  // none: nothing
  std::function<std::string()> text;
};

struct WarpState {
  Cta* cta = nullptr;
  int idx = 0;
  const char* role = "warp";
  uint32_t component = 0, tensor_component = 0;
  uint32_t step = 1, tensor_step = 0, tensor_done = 0;  // tensor: tcgen05.ld issued, waited for
  Clock generic, async, tensor;
  Clock async_global;               // as async, of global memory: the fence is the thread's own
  int64_t cluster_generation = -1;  // of the barrier.cluster.arrive that is not waited for
  Wait wait;
  std::unique_ptr<Fiber> fiber;
  View view() const { return {&generic, &async, &tensor}; }
};

// What acts by itself sees what its issuer saw when it issued.
struct Issued {
  Clock generic, async, tensor, async_global;
  explicit Issued(const WarpState& w)
      : generic(w.generic), async(w.async), tensor(w.tensor), async_global(w.async_global) {}
  View view() const { return {&generic, &async, &tensor}; }
  View global_view() const { return {&generic, &async_global, &tensor}; }
};

struct Running;

struct Cta {
  int idx = 0;
  Running* running = nullptr;
  Cluster* cluster = nullptr;
  int cluster_rank = 0;
  std::unique_ptr<std::byte[]> storage;
  std::byte* shared = nullptr;  // 1024-byte aligned
  size_t shared_bytes = 0;
  Shadow shared_shadow;
  std::vector<uint32_t> tmem;  // lane * kTmemColumns + column
  Shadow tmem_shadow;
  std::map<uint32_t, uint32_t> tmem_allocations;   // column -> columns
  uint32_t tmem_owner = 0;                         // record of the allocation
  int tmem_ctas = 0;                               // that allocated together
  std::map<uint32_t, Barrier> barriers;            // by shared address
  std::deque<std::function<void()>> tensor_queue;  // in order
  uint32_t tensor_component = 0, tensor_step = 0;
  std::vector<uint32_t> remote_records;  // of accesses to its shared memory by other CTAs
  Rendezvous sync;                       // __syncthreads
  std::vector<WarpState> warps;
  std::vector<std::unique_ptr<Warp>> machines;  // of the warps; they outlive them, for what is still in flight
  ~Cta();
};

// A launch on its way.
struct Running {
  Launch launch;
  std::vector<std::pair<size_t, cuda::Use>> memory;  // which of the Grid's it may touch
  int started = 0, ended = 0;
  int stores = 0;  // to global memory, in flight
  Clock before, over;
};

class Grid {
 public:
  Grid(Options options, std::vector<Launch> launches);
  ~Grid();
  void run();
  std::vector<Site> sites() const { return sites_.list(); }

  // For Warp (machine.h): one instruction each.
  struct Op {
    uint32_t site;
    const char* name;
    const char* mutant;  // "" unless this is the call to do wrongly
    bool is(const char* kind) const { return std::string(mutant) == kind; }
  };
  Op begin(WarpState& w, const char* name, const std::source_location& where);
  void pause(WarpState& w) { w.fiber->pause(); }
  void mark(const Op& op, const char* kind) { sites_.mark(op.site, kind); }
  bool chance(int one_in) { return random_() % static_cast<unsigned>(one_in) == 0; }

  uint32_t record(const WarpState& w, const Op& op, Proxy proxy, bool write, uint32_t component, uint32_t step,
                  bool strong = false);
  uint32_t shared_offset(const WarpState& w, const Op& op, const void* p, size_t num_bytes);
  // The CTA whose shared memory an address of the cluster is in, and the address there.
  std::pair<Cta*, uint32_t> in_cluster(const WarpState& w, const Op& op, uint32_t address);
  void touch_shared(const WarpState& w, const Op& op, uint32_t record, const View& view, uint32_t address,
                    size_t num_bytes) {
    touch_shared_of(*w.cta, w, op, record, view, address, num_bytes);
  }
  void touch_shared_of(Cta& in, const WarpState& w, const Op& op, uint32_t record, const View& view, uint32_t address,
                       size_t num_bytes);
  void touch_tmem(const WarpState& w, const Op& op, uint32_t record, const View& view, int lane, int lanes, int column,
                  int columns) {
    touch_tmem_of(*w.cta, w, op, record, view, lane, lanes, column, columns);
  }
  void touch_tmem_of(Cta& cta, const WarpState& w, const Op& op, uint32_t record, const View& view, int lane, int lanes,
                     int column, int columns);
  void touch_global(const WarpState& w, const Op& op, uint32_t record, const View& view, const void* p,
                    size_t num_bytes);
  std::string place(const WarpState& w, const void* p) const;  // "byte 8 of out"

  // What a flag in global memory says about the time before it was set.
  struct Flag {
    Clock generic, async;
  };
  Flag& flag(const void* p) { return flags_[p]; }

  Barrier& barrier(WarpState& w, const Op& op, uint32_t address) { return barrier_of(*w.cta, w, op, address); }
  Barrier& barrier_of(Cta& in, WarpState& w, const Op& op, uint32_t address);
  void arrive(const WarpState& w, const Op& op, Barrier& b, int count, const Clock& generic, const Clock* async);
  void complete_bytes(const WarpState& w, const Op& op, Barrier& b, int64_t num_bytes, const Clock& clock);
  void release(WarpState& w) { ++w.step, w.generic.raise(w.component, w.step); }

  uint32_t copy_component(const WarpState& w);  // one that the warp knows to be idle
  uint32_t next_copy_step(uint32_t component) { return ++copy_steps_[component]; }
  void launch_copy(std::function<void()> run) { copies_.push_back(std::move(run)); }

  [[noreturn]] void fail(const WarpState& w, const Op& op, const std::string& kind, const std::string& what) const;

 private:
  // Global memory, whichever launches touch it; one that only reads has no shadow.
  struct Memory {
    Buffer buffer;
    Shadow shadow;
  };

  bool is_over(const Running& r) const;
  void start_clusters();
  void start_cta(Running& r, Cluster& cluster);
  void end_cta(Cta& cta);
  void end_warp(WarpState& w);
  void step();
  [[noreturn]] void deadlock() const;
  [[noreturn]] void conflict(const WarpState& w, const Op& op, const Shadow::Conflict& c, uint32_t record,
                             const std::string& place) const;
  std::string who(const Cta& cta) const;  // "kernel, CTA 3"
  std::string who(const WarpState& w) const;
  std::string by(const Access& access) const;
  void complete_phase(Barrier& b);

  Options options_;
  std::vector<Running> launches_;
  std::vector<Memory> memory_;
  std::map<const void*, Flag> flags_;
  Sites sites_;
  std::vector<Access> records_{1};          // record 0 is none
  std::vector<std::unique_ptr<Cta>> ctas_;  // started; ended ones keep no memory
  std::vector<std::unique_ptr<Cluster>> clusters_;
  std::vector<Cta*> resident_;
  uint32_t components_ = 0;
  std::vector<uint32_t> copy_components_;
  std::map<uint32_t, uint32_t> copy_steps_;
  std::vector<std::function<void()>> copies_;  // in flight, in no order
  std::mt19937_64 random_;
  std::exception_ptr error_;
};

}  // namespace mxmoe::interpreter
