#include "interpreter/grid.h"

#include <algorithm>
#include <cstring>

#include "interpreter/machine.h"

namespace mxmoe::interpreter {

Grid::Grid(const char* kernel, Options options, int num_ctas, int warps_per_cta, size_t shared_bytes,
           std::vector<Buffer> buffers)
    : kernel_(kernel),
      options_(std::move(options)),
      num_ctas_(num_ctas),
      warps_per_cta_(warps_per_cta),
      shared_bytes_(shared_bytes),
      buffers_(std::move(buffers)),
      random_(options_.seed) {
  if (shared_bytes > kSharedBytes)
    throw KernelError("launch", kernel_ + " wants " + std::to_string(shared_bytes) + " bytes of shared memory");
  std::erase_if(buffers_, [](const Buffer& b) { return !b.data || !b.num_bytes; });
  for (const Buffer& b : buffers_)
    buffer_shadows_.emplace_back(b.use == cuda::Use::kRead ? 0 : b.num_bytes, b.use == cuda::Use::kUpdated);
}

Grid::~Grid() = default;
Cta::~Cta() = default;

// --- the scheduler

void Grid::run(const std::function<void(Warp&)>& body) {
  while (started_ < num_ctas_ || !resident_.empty()) {
    while (started_ < num_ctas_ && static_cast<int>(resident_.size()) < options_.num_sms) start_cta(body);
    step();
    for (size_t i = resident_.size(); i-- > 0;)
      if (resident_[i]->live == 0)
        end_cta(*resident_[i]), resident_.erase(resident_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

void Grid::start_cta(const std::function<void(Warp&)>& body) {
  ctas_.push_back(std::make_unique<Cta>());
  Cta& cta = *ctas_.back();
  cta.idx = started_++;
  cta.shared_bytes = shared_bytes_;
  cta.storage.reset(new std::byte[shared_bytes_ + 1024]);
  cta.shared = cta.storage.get() + (1024 - reinterpret_cast<uintptr_t>(cta.storage.get()) % 1024) % 1024;
  std::memset(cta.shared, 0x7f, shared_bytes_);  // NaN in FP8, a large number in FP32
  cta.shared_shadow = Shadow(shared_bytes_);
  cta.tensor_component = components_++;
  cta.live = warps_per_cta_;
  cta.warps = std::vector<WarpState>(static_cast<size_t>(warps_per_cta_));
  for (int i = 0; i < warps_per_cta_; ++i) {
    WarpState& w = cta.warps[static_cast<size_t>(i)];
    w.cta = &cta, w.idx = i;
    w.component = components_++, w.tensor_component = components_++;
    w.generic.raise(w.component, w.step);
    Warp* machine = cta.machines.emplace_back(std::make_unique<Warp>(*this, w)).get();
    w.fiber = std::make_unique<Fiber>([this, machine, &body] {
      try {
        body(*machine);
      } catch (...) {
        error_ = std::current_exception();
      }
    });
  }
  resident_.push_back(&cta);
}

void Grid::end_cta(Cta& cta) {
  const WarpState& w = cta.warps[0];
  while (!cta.tensor_queue.empty()) {  // in flight when the last warp left: harmless unless it reads what is gone
    auto run = std::move(cta.tensor_queue.front());
    cta.tensor_queue.pop_front();
    run();
  }
  if (!cta.tmem_allocations.empty())
    throw KernelError("tensor memory", who(w) + ": the CTA ended without freeing its tensor memory");
  for (auto& [address, b] : cta.barriers)
    if (b.bytes)
      throw KernelError("barrier", who(w) + ": the CTA ended while the barrier at shared address " +
                                       std::to_string(address) + " expects " + std::to_string(b.bytes) + " more bytes");
  cta.storage.reset();
  cta.shared = nullptr;
  cta.shared_shadow = Shadow();
  cta.tmem = {};
  cta.tmem_shadow = Shadow();
  for (WarpState& each : cta.warps) each.fiber.reset();
}

bool Grid::runnable(const WarpState& w) const {
  if (w.fiber->ended()) return false;
  if (w.wait.kind == Wait::kBarrier) return w.wait.barrier->parity != w.wait.parity;
  if (w.wait.kind == Wait::kSync) return w.cta->generation != w.wait.generation;
  return true;
}

// One warp runs to its next pause, or one engine finishes one operation. Some seeds starve the engines, some hurry
// them.
void Grid::step() {
  std::vector<WarpState*> warps;
  std::vector<Cta*> queues;
  for (Cta* cta : resident_) {
    for (WarpState& w : cta->warps)
      if (runnable(w)) warps.push_back(&w);
    if (!cta->tensor_queue.empty()) queues.push_back(cta);
  }
  const size_t engines = copies_.size() + queues.size();
  if (warps.empty() && !engines) deadlock();
  static constexpr unsigned kWarpShare[] = {50, 95, 10};  // of 100 steps
  const bool run_warp = !warps.empty() && (!engines || random_() % 100 < kWarpShare[options_.seed % 3]);
  if (run_warp) {
    WarpState& w = *warps[random_() % warps.size()];
    w.wait.kind = Wait::kNone;
    w.fiber->resume();
    if (error_) std::rethrow_exception(error_);
    if (w.fiber->ended() && --w.cta->live > 0 && w.cta->arrived == w.cta->live && w.cta->arrived)
      throw KernelError("barrier", who(w) + " ended while other warps of its CTA wait in syncthreads");
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

std::string Grid::who(const WarpState& w) const {
  return kernel_ + ", CTA " + std::to_string(w.cta->idx) + ", " + w.role + " (warp " + std::to_string(w.idx) + ")";
}

void Grid::fail(const WarpState& w, const Op& op, const std::string& kind, const std::string& what) const {
  throw KernelError(kind, who(w) + ", " + op.name + " at " + sites_[op.site].label + ": " + what);
}

void Grid::conflict(const WarpState& w, const Op& op, const Shadow::Conflict& c, uint32_t record,
                    const std::string& place) const {
  if (c.kind == Shadow::Conflict::kUninitialised) fail(w, op, "uninitialised", place + " was never written");
  const Access &before = records_[c.other], &now = records_[record];
  const auto& other = *static_cast<const WarpState*>(before.warp);
  fail(w, op, "race",
       std::string(now.write ? "write" : "read") + " of " + place + " is not ordered after the " +
           (before.write ? "write" : "read") + " by " + sites_[before.site].op + " at " + sites_[before.site].label +
           " of CTA " + std::to_string(other.cta->idx) + ", " + other.role);
}

void Grid::deadlock() const {
  std::string text = kernel_ + ": no warp can go on and nothing is in flight";
  for (const Cta* cta : resident_)
    for (const WarpState& w : cta->warps) {
      text += "\n  CTA " + std::to_string(cta->idx) + ", " + w.role + " (warp " + std::to_string(w.idx) + "): ";
      if (w.fiber->ended()) {
        text += "ended";
      } else if (w.wait.kind == Wait::kSync) {
        text += "in syncthreads at " + sites_[w.wait.site].label;
      } else {
        const Barrier& b = *w.wait.barrier;
        text += "waits at " + sites_[w.wait.site].label + " for parity " + std::to_string(w.wait.parity) +
                " of the barrier at shared address " + std::to_string(w.wait.address) + " (phase " +
                std::to_string(b.phases) + ", " + std::to_string(b.pending) + " of " + std::to_string(b.count) +
                " arrivals and " + std::to_string(b.bytes) + " bytes missing)";
      }
    }
  throw KernelError("deadlock", text);
}

// --- memory

uint32_t Grid::record(const WarpState& w, const Op& op, Proxy proxy, bool write, uint32_t component, uint32_t step) {
  records_.push_back({component, step, proxy, write, op.site, &w});
  return static_cast<uint32_t>(records_.size() - 1);
}

uint32_t Grid::shared_offset(const WarpState& w, const Op& op, const void* p, size_t num_bytes) {
  const auto offset = static_cast<const std::byte*>(p) - w.cta->shared;
  if (offset < 0 || static_cast<size_t>(offset) + num_bytes > w.cta->shared_bytes)
    fail(w, op, "out of bounds", "not in the CTA's shared memory");
  return static_cast<uint32_t>(offset);
}

void Grid::touch_shared(const WarpState& w, const Op& op, uint32_t record, const View& view, uint32_t address,
                        size_t num_bytes) {
  if (!w.cta->shared) fail(w, op, "race", "shared memory of a CTA that has ended");
  if (address + num_bytes > w.cta->shared_bytes)
    fail(w, op, "out of bounds",
         "shared address " + std::to_string(address) + " + " + std::to_string(num_bytes) + " of " +
             std::to_string(w.cta->shared_bytes));
  const auto c = w.cta->shared_shadow.access(records_, record, view, address, num_bytes);
  if (c.kind) conflict(w, op, c, record, "shared address " + std::to_string(c.cell));
}

void Grid::touch_tmem(const WarpState& w, const Op& op, uint32_t record, const View& view, int lane, int lanes,
                      int column, int columns) {
  Cta& cta = *w.cta;
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
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const Buffer& b = buffers_[i];
    const auto offset = address - static_cast<const std::byte*>(b.data);
    if (offset < 0 || static_cast<size_t>(offset) + num_bytes > b.num_bytes) continue;
    if (b.use == cuda::Use::kRead) {
      if (records_[record].write) fail(w, op, "out of bounds", "write to the input " + b.name);
      return;
    }
    const auto c = buffer_shadows_[i].access(records_, record, view, static_cast<size_t>(offset), num_bytes);
    if (c.kind) conflict(w, op, c, record, b.name + " byte " + std::to_string(c.cell));
    return;
  }
  std::string where = "in no buffer";
  size_t nearest = ~size_t{0};
  for (const Buffer& b : buffers_) {
    const auto past = address - (static_cast<const std::byte*>(b.data) + b.num_bytes);
    const auto distance = static_cast<size_t>(past < 0 ? -(address - static_cast<const std::byte*>(b.data)) : past);
    if (distance < nearest)
      nearest = distance, where = "byte " + std::to_string(address - static_cast<const std::byte*>(b.data)) + " of " +
                                  b.name + ", which has " + std::to_string(b.num_bytes);
  }
  fail(w, op, "out of bounds", std::to_string(num_bytes) + " bytes at " + where);
}

// --- barriers

Barrier& Grid::barrier(WarpState& w, const Op& op, uint32_t address) {
  const auto found = w.cta->barriers.find(address);
  if (found == w.cta->barriers.end())
    fail(w, op, "barrier", "no barrier was initialised at shared address " + std::to_string(address));
  return found->second;
}

void Grid::complete_phase(Barrier& b) {
  if (b.pending || b.bytes) return;
  b.parity ^= 1, ++b.phases;
  b.pending = b.count;
  b.completed.join(b.arriving), b.completed_async.join(b.arriving_async);
  b.arriving = {}, b.arriving_async = {};
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
