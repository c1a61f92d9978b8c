// Flags in global memory, by which warps of any device order what they do.
#include "interpreter/machine.h"

namespace mxmoe::interpreter {

void Warp::red_release_sys_add(uint32_t* flag, uint32_t value, pred p, Where where) {
  const Op op = begin("red.release.sys.add", where);
  p = active(op, p);
  const uint32_t record = grid.record(w, op, Proxy::kGeneric, true, w.component, w.step, true);
  for (int i = 0; i < kLanes; ++i) {
    if (!p[i]) continue;
    grid.touch_global(w, op, record, w.view(), flag, sizeof *flag);
    *flag += value;
    if (op.is("relaxed")) continue;
    Grid::Flag& says = grid.flag(flag);
    says.generic.join(w.generic), says.async.join(w.async);
    grid.release(w);
  }
}

void Warp::wait_acquire_sys(const uint32_t* flag, uint32_t at_least, Where where) {
  const Op op = begin("wait.acquire.sys", where);
  if (op.is("skip")) return;
  if (op.is("fewer") && at_least) --at_least;
  const uint32_t record = grid.record(w, op, Proxy::kGeneric, false, w.component, w.step, true);
  grid.touch_global(w, op, record, w.view(), flag, sizeof *flag);
  block(
      op, [flag, at_least] { return *flag >= at_least; },
      [this, flag, at_least] {
        return "until " + grid.place(w, flag) + ", now " + std::to_string(*flag) + ", is " + std::to_string(at_least);
      });
  if (op.is("relaxed")) return;
  const Grid::Flag& says = grid.flag(flag);
  w.generic.join(says.generic), w.async.join(says.async);
}

}  // namespace mxmoe::interpreter
