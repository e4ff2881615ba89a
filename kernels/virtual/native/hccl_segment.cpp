#include "hccl_segment.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <map>
#include <mutex>

#include "vnpu.h"

namespace {

constexpr char kMagic[8] = {'V', 'N', 'P', 'U', 'H', 'C', 'L', '1'};
constexpr size_t kHeaderBytes = 4096;
static_assert(sizeof(SegmentHeader) <= kHeaderBytes, "header fits its page");

std::mutex g_founded_lock;
std::map<uint64_t, int>& founded() {  // nonce -> descriptor, of segments that nobody here has joined yet
  static auto* map = new std::map<uint64_t, int>;
  return *map;
}

size_t align_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// Where a pid means what it means here.
std::string host_id() {
  char text[64] = "";
  FILE* file = fopen("/proc/sys/kernel/random/boot_id", "re");
  if (file != nullptr) {
    if (fgets(text, sizeof text, file) == nullptr) text[0] = '\0';
    fclose(file);
  }
  text[strcspn(text, "\n")] = '\0';
  struct stat space = {};
  stat("/proc/self/ns/pid", &space);
  return std::string(text) + ":" + std::to_string(space.st_ino);
}

int take_founded(uint64_t nonce) {
  std::lock_guard<std::mutex> lock(g_founded_lock);
  auto it = founded().find(nonce);
  if (it == founded().end()) return -1;
  int fd = it->second;
  founded().erase(it);
  return fd;
}

int open_foreign(const RootInfo& root) {
  if (host_id() != root.host)
    vnpu_throw(HCCL_NOT_SUPPORT,
               "HCCL on virtual NPUs joins processes of one machine (and one container) only; the root rank runs "
               "elsewhere");
  if (!process_alive(root.pid, root.start_time))
    vnpu_throw(HCCL_REMOTE, "the process that founded the communicator (pid %d) is gone", root.pid);
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", root.pid, root.fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0)
    vnpu_throw(HCCL_SYSCALL, "cannot open the communicator's memory %s of the root rank: %s", path,
               strerror(errno));
  return fd;
}

}  // namespace

double now_seconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

void sleep_on(Bell& bell, uint32_t seen, int milliseconds) {
  timespec limit = {milliseconds / 1000, (milliseconds % 1000) * 1000000L};
  bell.sleepers.fetch_add(1);
  // The kernel compares `count` again before sleeping, so a ring between our look and this call is not lost.
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&bell.count), FUTEX_WAIT, seen, &limit, nullptr, 0);
  bell.sleepers.fetch_sub(1);
}

void Bell::ring() {
  count.fetch_add(1);
  if (sleepers.load() != 0)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&count), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

uint64_t process_start_time(int pid) {
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  FILE* file = fopen(path, "re");
  if (file == nullptr) return 0;
  size_t length = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  text[length] = '\0';
  // The command name stands in parentheses and may hold anything, so fields are counted from its end.
  char* rest = strrchr(text, ')');
  if (rest == nullptr || rest[1] == '\0') return 0;
  char state = rest[2];
  if (state == 'Z' || state == 'X') return 0;
  char* save = nullptr;
  char* field = strtok_r(rest + 1, " ", &save);
  for (int i = 3; field != nullptr && i < 22; ++i) field = strtok_r(nullptr, " ", &save);
  return field == nullptr ? 0 : strtoull(field, nullptr, 10);
}

bool process_alive(int pid, uint64_t start_time) {
  return start_time != 0 && process_start_time(pid) == start_time;
}

RootInfo Segment::found() {
  RootInfo root = {};
  memcpy(root.magic, kMagic, sizeof kMagic);
  if (getrandom(&root.nonce, sizeof root.nonce, 0) != sizeof root.nonce)
    vnpu_throw(HCCL_SYSCALL, "getrandom: %s", strerror(errno));
  root.pid = getpid();
  root.start_time = process_start_time(root.pid);
  snprintf(root.host, sizeof root.host, "%s", host_id().c_str());
  root.fd = memfd_create("vnpu-hccl", MFD_CLOEXEC);
  if (root.fd < 0) vnpu_throw(HCCL_SYSCALL, "memfd_create: %s", strerror(errno));
  void* page = MAP_FAILED;
  if (ftruncate(root.fd, kHeaderBytes) == 0)
    page = mmap(nullptr, kHeaderBytes, PROT_READ | PROT_WRITE, MAP_SHARED, root.fd, 0);
  if (page == MAP_FAILED) {
    int error = errno;
    close(root.fd);
    vnpu_throw(HCCL_MEMORY, "cannot map the communicator's memory: %s", strerror(error));
  }
  SegmentHeader* header = static_cast<SegmentHeader*>(page);
  header->nonce = root.nonce;
  memcpy(header->magic, kMagic, sizeof kMagic);
  munmap(page, kHeaderBytes);
  std::lock_guard<std::mutex> lock(g_founded_lock);
  founded()[root.nonce] = root.fd;
  return root;
}

Segment::Segment(const RootInfo& root, uint32_t ranks) : ranks_(ranks) {
  if (memcmp(root.magic, kMagic, sizeof kMagic) != 0)
    vnpu_throw(HCCL_PARA, "the root info was not made by HcclGetRootInfo of the virtual NPU");
  ring_bytes_ = ranks <= 8 ? 256 << 10 : 64 << 10;
  blocks_ = kHeaderBytes;
  counts_ = blocks_ + align_up(sizeof(RankBlock) * ranks, 4096);
  slots_ = counts_ + align_up(sizeof(uint64_t) * 4 * ranks * ranks, 4096);
  rings_ = slots_ + kSlotBytes * 2 * ranks;
  total_ = rings_ + (sizeof(Ring) + ring_bytes_) * ranks * ranks;
  fd_ = take_founded(root.nonce);
  if (fd_ < 0) fd_ = open_foreign(root);
  struct stat info = {};
  // Every rank grows the file to the same size, so it does not matter who comes first. A rank with another
  // idea of the size is found out by its number of ranks before it uses more than the header.
  bool grown = fstat(fd_, &info) == 0 &&
               (static_cast<size_t>(info.st_size) >= total_ || ftruncate(fd_, static_cast<off_t>(total_)) == 0);
  void* base = grown ? mmap(nullptr, total_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0) : MAP_FAILED;
  if (base == MAP_FAILED) {
    int error = errno;
    close_file();
    vnpu_throw(HCCL_MEMORY, "cannot map %zu bytes for a communicator of %u ranks: %s", total_, ranks,
               strerror(error));
  }
  base_ = static_cast<char*>(base);
  if (header().nonce != root.nonce || memcmp(header().magic, kMagic, sizeof kMagic) != 0) {
    munmap(base_, total_);
    close_file();
    vnpu_throw(HCCL_REMOTE, "the communicator that the root info names is gone (pid %d has closed it)",
               root.pid);
  }
}

void Segment::close_file() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

Segment::~Segment() {
  close_file();
  munmap(base_, total_);
}
