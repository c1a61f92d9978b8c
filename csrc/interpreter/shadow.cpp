#include "interpreter/shadow.h"

namespace mxmoe::interpreter {

bool is_ordered(const Access& before, const Access& now, const View& view) {
  if (before.strong && now.strong) return true;
  const bool crosses = before.proxy == Proxy::kGeneric && now.proxy == Proxy::kAsync && before.write;
  if (before.component == now.component && !crosses) return true;  // in program order
  const Clock& clock = now.proxy == Proxy::kTensor ? *view.tensor : crosses ? *view.async : *view.generic;
  return clock.of(before.component) >= before.step;
}

template <typename F>
void Shadow::each_reader(uint32_t readers, F f) const {
  if (readers & kSingle) return f(readers & ~kSingle);
  if (readers)
    for (uint32_t record : sets_[readers - 1]) f(record);
}

uint32_t Shadow::with_reader(const std::vector<Access>& records, uint32_t readers, uint32_t record, const View& view) {
  std::vector<uint32_t> kept;
  each_reader(readers, [&](uint32_t other) {
    if (!is_ordered(records[other], records[record], view)) kept.push_back(other);
  });
  if (kept.empty()) return record | kSingle;
  kept.push_back(record);
  sets_.push_back(std::move(kept));
  return static_cast<uint32_t>(sets_.size());
}

Shadow::Conflict Shadow::access(const std::vector<Access>& records, uint32_t record, const View& view, size_t first,
                                size_t count) {
  const Access& now = records[record];
  if (record != record_) record_ = record, before_ = {~0u, ~0u};
  for (size_t i = first; i < first + count; ++i) {
    Cell& cell = cells_[i];
    if (cell.writer != before_.writer || cell.readers != before_.readers) {
      const Cell old = cell;
      if (!now.write && !old.writer && !initialised_) return {Conflict::kUninitialised, i, 0};
      if (old.writer && old.writer != record && !is_ordered(records[old.writer], now, view))
        return {Conflict::kRace, i, old.writer};
      if (now.write) {
        uint32_t racing = 0;
        each_reader(old.readers, [&](uint32_t reader) {
          if (!is_ordered(records[reader], now, view)) racing = reader;
        });
        if (racing) return {Conflict::kRace, i, racing};
        after_ = {record, 0};
      } else {
        after_ = {old.writer, with_reader(records, old.readers, record, view)};
      }
      before_ = old;
    }
    cell = after_;
  }
  return {};
}

}  // namespace mxmoe::interpreter
