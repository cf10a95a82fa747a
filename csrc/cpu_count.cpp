// The number of threads for this process. On Linux it is the number of physical cores in its CPU affinity, limited by
// the cgroup CPU quota. On CPUs with two kinds of cores, only performance cores count.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <thread>

#include "quire/thread_pool.h"

#if defined(__linux__)
#include <sched.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace quire {
namespace {

#if defined(__linux__)

// The numbers of a list like "0-3,8", as Linux writes it.
std::set<int> numbers_of_list(const std::string& list) {
  std::set<int> numbers;
  std::istringstream ranges(list);
  for (std::string range; std::getline(ranges, range, ',');) {
    const size_t dash = range.find('-');
    const int first = std::atoi(range.c_str());
    const int last = dash == std::string::npos ? first : std::atoi(range.c_str() + dash + 1);
    for (int number = first; number <= last; ++number) numbers.insert(number);
  }
  return numbers;
}

std::string cpu_folder(const std::string& root, int cpu) {
  return root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu);
}

// The CPUs without those that are slower than others of them. Of Intel's CPUs with two kinds of cores, Linux lists the
// fast ones. On ARM64 it gives each CPU a capacity, and a slow one has less than half of the largest.
std::set<int> fast_cpus(const std::set<int>& cpus, const std::string& root) {
  std::string fast_list;
  std::ifstream(root + "/sys/devices/cpu_core/cpus") >> fast_list;
  const std::set<int> listed = numbers_of_list(fast_list);
  std::set<int> fast;
  std::set_intersection(cpus.begin(), cpus.end(), listed.begin(), listed.end(), std::inserter(fast, fast.end()));
  if (!fast.empty()) return fast;
  std::map<int, int> capacities;
  int largest = 0;
  for (const int cpu : cpus) {
    std::ifstream(cpu_folder(root, cpu) + "/cpu_capacity") >> capacities[cpu];
    largest = std::max(largest, capacities[cpu]);
  }
  for (const auto& [cpu, capacity] : capacities)
    if (2 * capacity >= largest) fast.insert(cpu);
  return fast;
}

int physical_cores_of_affinity(const std::string& root) {
  cpu_set_t affinity;
  if (sched_getaffinity(0, sizeof(affinity), &affinity) != 0)
    return static_cast<int>(std::thread::hardware_concurrency());
  std::set<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &affinity)) cpus.insert(cpu);
  std::set<std::string> cores;  // hyper-threads of one core have the same list of siblings
  for (const int cpu : fast_cpus(cpus, root)) {
    std::ifstream file(cpu_folder(root, cpu) + "/topology/thread_siblings_list");
    std::string siblings;
    if (!(file >> siblings)) siblings = std::to_string(cpu);
    cores.insert(siblings);
  }
  return static_cast<int>(cores.size());
}

// The number of CPUs that one cgroup directory grants; infinity: there is no limit. In cgroup v2, "cpu.max" holds
// "<quota|max> <period>" in microseconds. In v1, there are cpu.cfs_quota_us (-1: no limit) and cpu.cfs_period_us.
double quota_of(const std::string& directory) {
  double quota = -1, period = 0;
  if (std::ifstream v2(directory + "/cpu.max"); v2) {
    std::string first;
    v2 >> first >> period;
    if (first != "max" && !first.empty()) quota = std::atof(first.c_str());
  } else {
    std::ifstream(directory + "/cpu.cfs_quota_us") >> quota;
    std::ifstream(directory + "/cpu.cfs_period_us") >> period;
  }
  return quota > 0 && period > 0 ? quota / period : INFINITY;
}

// The smallest quota on the path from this process's cgroup to the root.
double cgroup_quota(const std::string& root) {
  double quota = INFINITY;
  std::ifstream membership(root + "/proc/self/cgroup");
  for (std::string line; std::getline(membership, line);) {  // "<id>:<controllers>:<path>"
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool is_v2 = controllers.empty();
    if (!is_v2 && ("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
    const std::string mount = root + (is_v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu");
    for (std::string path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
      if (path == "/") path.clear();
      quota = std::min(quota, quota_of(mount + path));
      if (path.empty()) break;
    }
  }
  return quota;
}

#elif defined(__APPLE__)

// A number of macOS by its name; 0: this macOS does not know the name.
int system_number(const char* name) {
  int value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 ? value : 0;
}

#endif

}  // namespace

int default_num_threads() { return num_threads_described_in(""); }

int num_threads_described_in([[maybe_unused]] const std::string& root) {
#if defined(__linux__)
  const double cores = std::min<double>(physical_cores_of_affinity(root), std::floor(cgroup_quota(root)));
  return std::max(1, static_cast<int>(cores));
#elif defined(__APPLE__)
  // Performance cores are level 0. Macs with Intel's CPUs have no levels.
  const int fast = system_number("hw.perflevel0.physicalcpu");
  return std::max(1, fast > 0 ? fast : system_number("hw.physicalcpu"));
#else
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
#endif
}

}  // namespace quire
