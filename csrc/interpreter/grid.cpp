#include "interpreter/grid.h"

#include <algorithm>
#include <cstring>

#include "interpreter/machine.h"

namespace mxmoe::interpreter {

Grid::Grid(Options options, std::vector<Launch> launches) : options_(std::move(options)), random_(options_.seed) {
  for (Launch& launch : launches) {
    if (launch.shared_bytes > kSharedBytes)
      throw KernelError("launch",
                        launch.kernel + " wants " + std::to_string(launch.shared_bytes) + " bytes of shared memory");
    if (launch.num_ctas % launch.cluster_ctas)
      throw KernelError("launch", launch.kernel + " wants clusters of " + std::to_string(launch.cluster_ctas) +
                                      " CTAs, not a divisor of " + std::to_string(launch.num_ctas));
    Running& r = launches_.emplace_back();
    for (const Buffer& b : launch.buffers) {
      if (!b.data || !b.num_bytes) continue;
      size_t i = 0;
      while (i < memory_.size() && (memory_[i].buffer.data != b.data || memory_[i].buffer.num_bytes != b.num_bytes))
        ++i;
      if (i == memory_.size()) memory_.push_back({b, Shadow()});
      cuda::Use& use = memory_[i].buffer.use;  // by any: written, else updated, else read
      if (use == cuda::Use::kRead || b.use == cuda::Use::kWritten) use = b.use;
      r.memory.emplace_back(i, b.use);
    }
    r.launch = std::move(launch);
  }
  for (Memory& m : memory_)
    if (m.buffer.use != cuda::Use::kRead) m.shadow = Shadow(m.buffer.num_bytes, m.buffer.use == cuda::Use::kUpdated);
}

Grid::~Grid() = default;
Cta::~Cta() = default;

// --- the scheduler

bool Grid::is_over(const Running& r) const {
  const int after = r.launch.after;
  return r.ended == r.launch.num_ctas && r.stores == 0 && (after < 0 || is_over(launches_[static_cast<size_t>(after)]));
}

void Grid::run() {
  for (uint32_t steps = 1;; ++steps) {
    if (options_.poll && steps % kPollSteps == 0) options_.poll();
    start_clusters();
    if (resident_.empty() && copies_.empty()) return;
    step();
    for (size_t i = resident_.size(); i-- > 0;)
      if (resident_[i]->sync.live == 0)
        end_cta(*resident_[i]), resident_.erase(resident_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

void Grid::start_clusters() {
  for (Running& r : launches_) {
    if (r.started == r.launch.num_ctas) continue;
    if (r.launch.after >= 0) {
      const Running& before = launches_[static_cast<size_t>(r.launch.after)];
      if (!is_over(before)) continue;
      if (r.started == 0) r.before = before.over;
    }
    const int room = std::max(options_.num_sms, r.launch.cluster_ctas);
    while (r.started < r.launch.num_ctas && r.started - r.ended + r.launch.cluster_ctas <= room) {
      Cluster& cluster = *clusters_.emplace_back(std::make_unique<Cluster>());
      for (int i = 0; i < r.launch.cluster_ctas; ++i) start_cta(r, cluster);
    }
  }
}

void Grid::start_cta(Running& r, Cluster& cluster) {
  Cta& cta = *ctas_.emplace_back(std::make_unique<Cta>());
  cta.idx = r.started++;
  cta.running = &r, cta.cluster = &cluster;
  cta.cluster_rank = static_cast<int>(cluster.ctas.size());
  cluster.ctas.push_back(&cta);
  cta.shared_bytes = r.launch.shared_bytes;
  cta.storage.reset(new std::byte[cta.shared_bytes + 1024]);
  cta.shared = cta.storage.get() + (1024 - reinterpret_cast<uintptr_t>(cta.storage.get()) % 1024) % 1024;
  std::memset(cta.shared, 0x7f, cta.shared_bytes);  // NaN in FP8, a large number in FP32
  cta.shared_shadow = Shadow(cta.shared_bytes);
  cta.tensor_component = components_++;
  const int num_warps = r.launch.warps_per_cta;
  cta.sync.live = num_warps, cluster.barrier.live += num_warps;
  cta.warps = std::vector<WarpState>(static_cast<size_t>(num_warps));
  for (int i = 0; i < num_warps; ++i) {
    WarpState& w = cta.warps[static_cast<size_t>(i)];
    w.cta = &cta, w.idx = i;
    w.component = components_++, w.tensor_component = components_++;
    w.generic.join(r.before), w.async.join(r.before), w.async_global.join(r.before);
    w.generic.raise(w.component, w.step);
    Warp* machine = cta.machines.emplace_back(std::make_unique<Warp>(*this, w)).get();
    w.fiber = std::make_unique<Fiber>([this, machine, &r] {
      try {
        r.launch.body(*machine);
      } catch (...) {
        error_ = std::current_exception();
      }
    });
  }
  resident_.push_back(&cta);
}

void Grid::end_cta(Cta& cta) {
  while (!cta.tensor_queue.empty()) {  // in flight when the last warp left: harmless unless it reads what is gone
    auto run = std::move(cta.tensor_queue.front());
    cta.tensor_queue.pop_front();
    run();
  }
  if (!cta.tmem_allocations.empty())
    throw KernelError("tensor memory", who(cta) + ": the CTA ended without freeing its tensor memory");
  for (auto& [address, b] : cta.barriers)
    if (b.bytes)
      throw KernelError("barrier", who(cta) + ": the CTA ended while the barrier at shared address " +
                                       std::to_string(address) + " expects " + std::to_string(b.bytes) + " more bytes");
  Clock end;
  for (const WarpState& w : cta.warps) end.join(w.generic);
  for (uint32_t record : cta.remote_records)
    if (end.of(records_[record].component) < records_[record].step)
      throw KernelError("race", who(cta) +
                                    ": the end of the CTA is not ordered after the access to its shared memory by " +
                                    by(records_[record]));
  cta.running->over.join(end);
  ++cta.running->ended;
  cta.storage.reset();
  cta.shared = nullptr;
  cta.shared_shadow = Shadow();
  cta.tmem = {};
  cta.tmem_shadow = Shadow();
  for (WarpState& each : cta.warps) each.fiber.reset();
}

void Grid::end_warp(WarpState& w) {
  Cta& cta = *w.cta;
  cta.machines[static_cast<size_t>(w.idx)]->end();
  if (--cta.sync.live > 0 && cta.sync.arrived == cta.sync.live && cta.sync.arrived)
    throw KernelError("barrier", who(w) + " ended while other warps of its CTA wait in syncthreads");
  --cta.cluster->barrier.live;
  cta.cluster->barrier.complete();
}

// One warp runs to its next pause, or one engine finishes one operation. Some seeds starve the engines, some hurry
// them.
void Grid::step() {
  std::vector<WarpState*> warps;
  std::vector<Cta*> queues;
  for (Cta* cta : resident_) {
    for (WarpState& w : cta->warps)
      if (!w.fiber->ended() && (!w.wait.ready || w.wait.ready())) warps.push_back(&w);
    if (!cta->tensor_queue.empty()) queues.push_back(cta);
  }
  const size_t engines = copies_.size() + queues.size();
  if (warps.empty() && !engines) deadlock();
  static constexpr unsigned kWarpShare[] = {50, 95, 10};  // of 100 steps
  const bool run_warp = !warps.empty() && (!engines || random_() % 100 < kWarpShare[options_.seed % 3]);
  if (run_warp) {
    // One of the devices is slow, or none.
    const auto slow = static_cast<int>(options_.seed % (static_cast<size_t>(launches_.back().launch.device) + 2)) - 1;
    const auto pick = [&] { return warps[random_() % warps.size()]; };
    WarpState* picked = pick();
    for (int i = 0; i < 8 && picked->cta->running->launch.device == slow && launches_.size() > 1; ++i) picked = pick();
    WarpState& w = *picked;
    w.wait = {};
    w.fiber->resume();
    if (error_) std::rethrow_exception(error_);
    if (w.fiber->ended()) end_warp(w);
    return;
  }
  size_t i = random_() % engines;
  std::function<void()> run;
  if (i < copies_.size()) {
    run = std::move(copies_[i]);
    copies_[i] = std::move(copies_.back());
    copies_.pop_back();
  } else {
    auto& queue = queues[i - copies_.size()]->tensor_queue;
    run = std::move(queue.front());
    queue.pop_front();
  }
  run();
}

Grid::Op Grid::begin(WarpState& w, const char* name, const std::source_location& where) {
  if (chance(8)) pause(w);
  Op op{sites_.find(name, where), name, ""};
  if (!options_.mutant_site.empty() && sites_[op.site].label == options_.mutant_site)
    op.mutant = options_.mutant.c_str();
  return op;
}

// --- reports

std::string Grid::who(const Cta& cta) const {
  const Launch& launch = cta.running->launch;
  const bool several = launches_.front().launch.device != launches_.back().launch.device;
  return launch.kernel + (several ? ", device " + std::to_string(launch.device) : "") + ", CTA " +
         std::to_string(cta.idx);
}

std::string Grid::who(const WarpState& w) const {
  return who(*w.cta) + ", " + w.role + " (warp " + std::to_string(w.idx) + ")";
}

std::string Grid::by(const Access& access) const {
  const auto& w = *static_cast<const WarpState*>(access.warp);
  const std::string at = std::string(sites_[access.site].op) + " at " + sites_[access.site].label;
  if (launches_.size() > 1) return at + " of " + who(w);
  return at + " of CTA " + std::to_string(w.cta->idx) + ", " + w.role;
}

void Grid::fail(const WarpState& w, const Op& op, const std::string& kind, const std::string& what) const {
  throw KernelError(kind, who(w) + ", " + op.name + " at " + sites_[op.site].label + ": " + what);
}

void Grid::conflict(const WarpState& w, const Op& op, const Shadow::Conflict& c, uint32_t record,
                    const std::string& place) const {
  if (c.kind == Shadow::Conflict::kUninitialised) fail(w, op, "uninitialised", place + " was never written");
  const Access &before = records_[c.other], &now = records_[record];
  fail(w, op, "race",
       std::string(now.write ? "write" : "read") + " of " + place + " is not ordered after the " +
           (before.write ? "write" : "read") + " by " + by(before));
}

void Grid::deadlock() const {
  std::string text = resident_.front()->running->launch.kernel + ": no warp can go on and nothing is in flight";
  for (const Cta* cta : resident_)
    for (const WarpState& w : cta->warps)
      text += "\n  " + who(w) + ": " +
              (w.fiber->ended() ? "ended" : "waits at " + sites_[w.wait.site].label + " " + w.wait.text());
  throw KernelError("deadlock", text);
}

// --- memory

uint32_t Grid::record(const WarpState& w, const Op& op, Proxy proxy, bool write, uint32_t component, uint32_t step,
                      bool strong) {
  records_.push_back({component, step, proxy, write, op.site, &w, strong});
  return static_cast<uint32_t>(records_.size() - 1);
}

uint32_t Grid::shared_offset(const WarpState& w, const Op& op, const void* p, size_t num_bytes) {
  const auto offset = static_cast<const std::byte*>(p) - w.cta->shared;
  if (offset < 0 || static_cast<size_t>(offset) + num_bytes > w.cta->shared_bytes)
    fail(w, op, "out of bounds", "not in the CTA's shared memory");
  return static_cast<uint32_t>(offset);
}

std::pair<Cta*, uint32_t> Grid::in_cluster(const WarpState& w, const Op& op, uint32_t address) {
  if (address < kClusterWindow) return {w.cta, address};
  const auto& ctas = w.cta->cluster->ctas;
  const uint32_t rank = address / kClusterWindow - 1;
  if (rank >= ctas.size()) fail(w, op, "out of bounds", "no CTA " + std::to_string(rank) + " in the cluster");
  Cta& cta = *ctas[rank];
  if (&cta != w.cta && !w.generic.of(cta.warps[0].component))
    fail(w, op, "race", "nothing says that CTA " + std::to_string(cta.idx) + " of the cluster has begun");
  return {&cta, address % kClusterWindow};
}

void Grid::touch_shared_of(Cta& in, const WarpState& w, const Op& op, uint32_t record, const View& view,
                           uint32_t address, size_t num_bytes) {
  if (!in.shared) fail(w, op, "race", "shared memory of a CTA that has ended");
  if (address + num_bytes > in.shared_bytes)
    fail(w, op, "out of bounds",
         "shared address " + std::to_string(address) + " + " + std::to_string(num_bytes) + " of " +
             std::to_string(in.shared_bytes));
  if (&in != w.cta && (in.remote_records.empty() || in.remote_records.back() != record))
    in.remote_records.push_back(record);
  const auto c = in.shared_shadow.access(records_, record, view, address, num_bytes);
  if (c.kind) conflict(w, op, c, record, "shared address " + std::to_string(c.cell));
}

void Grid::touch_tmem_of(Cta& cta, const WarpState& w, const Op& op, uint32_t record, const View& view, int lane,
                         int lanes, int column, int columns) {
  const auto next = cta.tmem_allocations.upper_bound(static_cast<uint32_t>(column));
  const bool allocated = next != cta.tmem_allocations.begin() &&
                         column + columns <= static_cast<int>(std::prev(next)->first + std::prev(next)->second);
  if (!allocated || lane < 0 || lane + lanes > kTmemLanes)
    fail(w, op, "tensor memory",
         "columns " + std::to_string(column) + " to " + std::to_string(column + columns) + " are not allocated");
  if (!is_ordered(records_[cta.tmem_owner], records_[record], view))
    fail(w, op, "race", "the allocation of tensor memory is not ordered before its use");
  for (int i = lane; i < lane + lanes; ++i) {
    const size_t first = static_cast<size_t>(i) * kTmemColumns + static_cast<size_t>(column);
    const auto c = cta.tmem_shadow.access(records_, record, view, first, static_cast<size_t>(columns));
    if (c.kind)
      conflict(w, op, c, record,
               "tensor memory lane " + std::to_string(i) + ", column " + std::to_string(c.cell % kTmemColumns));
  }
}

void Grid::touch_global(const WarpState& w, const Op& op, uint32_t record, const View& view, const void* p,
                        size_t num_bytes) {
  const auto* address = static_cast<const std::byte*>(p);
  std::string where = "in no buffer";
  size_t nearest = ~size_t{0};
  for (const auto& [i, use] : w.cta->running->memory) {
    Memory& memory = memory_[i];
    const Buffer& b = memory.buffer;
    const auto offset = address - static_cast<const std::byte*>(b.data);
    const auto past = offset - static_cast<std::ptrdiff_t>(b.num_bytes);
    if (offset < 0 || past + static_cast<std::ptrdiff_t>(num_bytes) > 0) {
      const auto distance = static_cast<size_t>(offset < 0 ? -offset : past < 0 ? 0 : past);
      if (distance < nearest)
        nearest = distance,
        where = "byte " + std::to_string(offset) + " of " + b.name + ", which has " + std::to_string(b.num_bytes);
      continue;
    }
    if (use == cuda::Use::kRead && records_[record].write) fail(w, op, "out of bounds", "write to the input " + b.name);
    if (b.use == cuda::Use::kRead) return;
    const auto c = memory.shadow.access(records_, record, view, static_cast<size_t>(offset), num_bytes);
    if (c.kind) conflict(w, op, c, record, b.name + " byte " + std::to_string(c.cell));
    return;
  }
  fail(w, op, "out of bounds", std::to_string(num_bytes) + " bytes at " + where);
}

std::string Grid::place(const WarpState& w, const void* p) const {
  for (const auto& [i, use] : w.cta->running->memory) {
    const Buffer& b = memory_[i].buffer;
    const auto offset = static_cast<const std::byte*>(p) - static_cast<const std::byte*>(b.data);
    if (offset >= 0 && static_cast<size_t>(offset) < b.num_bytes)
      return "byte " + std::to_string(offset) + " of " + b.name;
  }
  return "nowhere";
}

// --- barriers

void Rendezvous::arrive(const WarpState& w) {
  arriving.join(w.generic), arriving_async.join(w.async);
  ++arrived;
}

void Rendezvous::complete() {
  if (!arrived || arrived < live) return;
  arrived = 0, ++generation;
  completed = std::move(arriving), completed_async = std::move(arriving_async);
  arriving = {}, arriving_async = {};
}

Barrier& Grid::barrier_of(Cta& in, WarpState& w, const Op& op, uint32_t address) {
  const auto found = in.barriers.find(address);
  if (found == in.barriers.end())
    fail(w, op, "barrier", "no barrier was initialised at shared address " + std::to_string(address));
  return found->second;
}

void Grid::complete_phase(Barrier& b) {
  if (b.pending || b.bytes) return;
  b.parity ^= 1, ++b.phases;
  b.pending = b.count;
  b.completed.join(b.arriving), b.completed_async.join(b.arriving_async);
  b.completed_remote.join(b.arriving_remote), b.completed_remote_async.join(b.arriving_remote_async);
  b.arriving = {}, b.arriving_async = {}, b.arriving_remote = {}, b.arriving_remote_async = {};
}

void Grid::arrive(const WarpState& w, const Op& op, Barrier& b, int count, const Clock& generic, const Clock* async) {
  if (b.pending < count)
    fail(w, op, "barrier",
         "more arrivals than the " + std::to_string(b.count) + " that the barrier was initialised with");
  b.arriving.join(generic);
  if (async) b.arriving_async.join(*async);
  b.pending -= count;
  complete_phase(b);
}

void Grid::complete_bytes(const WarpState&, const Op&, Barrier& b, int64_t num_bytes, const Clock& clock) {
  b.arriving.join(clock);
  b.bytes -= num_bytes;
  complete_phase(b);
}

// A component whose last copy the warp knows to be over, so that its steps stay in order; a new one where there is
// none.
uint32_t Grid::copy_component(const WarpState& w) {
  for (uint32_t c : copy_components_)
    if (w.generic.of(c) >= copy_steps_[c]) return c;
  copy_components_.push_back(components_++);
  return copy_components_.back();
}

}  // namespace mxmoe::interpreter
