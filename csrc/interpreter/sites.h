// The places in kernel text where a Machine method is called: each is one instruction, and one thing to get wrong.
#pragma once
#include <cstdint>
#include <source_location>
#include <string>
#include <vector>

namespace mxmoe::interpreter {

struct Site {
  std::string label;  // "grouped_mm.h:120:7"
  const char* op;     // the method
  int64_t calls = 0;
  std::vector<const char*> kinds;  // of mutants that are none everywhere: "all lanes" where a call left lanes out
};

// Of one launch.
class Sites {
 public:
  uint32_t find(const char* op, const std::source_location& where);
  const Site& operator[](uint32_t id) const { return sites_[id].site; }
  void mark(uint32_t id, const char* kind);
  std::vector<Site> list() const;

 private:
  struct Entry {
    const char* file;
    uint32_t line, column;
    Site site;
  };
  std::vector<Entry> sites_;
};

}  // namespace mxmoe::interpreter
