#include "interpreter/sites.h"

#include <algorithm>

namespace mxmoe::interpreter {

uint32_t Sites::find(const char* op, const std::source_location& where) {
  for (uint32_t i = 0; i < sites_.size(); ++i) {
    Entry& e = sites_[i];
    if (e.line == where.line() && e.column == where.column() && e.file == where.file_name()) {
      ++e.site.calls;
      return i;
    }
  }
  std::string file = where.file_name();
  file = file.substr(file.rfind('/') + 1);
  sites_.push_back({where.file_name(),
                    where.line(),
                    where.column(),
                    {file + ":" + std::to_string(where.line()) + ":" + std::to_string(where.column()), op, 1, {}}});
  return static_cast<uint32_t>(sites_.size() - 1);
}

void Sites::mark(uint32_t id, const char* kind) {
  auto& kinds = sites_[id].site.kinds;
  if (std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) kinds.push_back(kind);
}

std::vector<Site> Sites::list() const {
  std::vector<Site> all;
  for (const Entry& e : sites_) all.push_back(e.site);
  return all;
}

}  // namespace mxmoe::interpreter
