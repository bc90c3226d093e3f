#include "services/tools/top/terminal.h"

#include "kvtier/error.h"

#include <cerrno>
#include <csignal>
#include <poll.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

namespace kvtier::services {
namespace {

termios before;
volatile std::sig_atomic_t ended = 0;
volatile std::sig_atomic_t resized = 0;

void write_all(const std::string& text) {
  for (std::size_t at = 0; at < text.size();) {
    const ssize_t written = ::write(STDOUT_FILENO, text.data() + at, text.size() - at);
    if (written < 0 && errno != EINTR) return;
    if (written > 0) at += static_cast<std::size_t>(written);
  }
}

winsize size_of_window() {
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) size = {24, 80, 0, 0};
  return size;
}

}  // namespace

Terminal::Terminal() {
  if (::isatty(STDIN_FILENO) == 0 || ::isatty(STDOUT_FILENO) == 0 ||
      ::tcgetattr(STDIN_FILENO, &before) != 0) {
    throw Error(ErrorCode::kFailedPrecondition,
                "top: expected a terminal, found none; --once prints one frame");
  }
  termios raw = before;
  raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO | ISIG);
  (void)::tcsetattr(STDIN_FILENO, TCSANOW, &raw);
  struct sigaction action {};
  action.sa_handler = [](int) { ended = 1; };
  (void)::sigaction(SIGTERM, &action, nullptr);
  (void)::sigaction(SIGHUP, &action, nullptr);
  action.sa_handler = [](int) { resized = 1; };
  (void)::sigaction(SIGWINCH, &action, nullptr);
  write_all("\033[?1049h\033[?25l");
}

Terminal::~Terminal() {
  write_all("\033[?25h\033[?1049l");
  (void)::tcsetattr(STDIN_FILENO, TCSANOW, &before);
}

std::size_t Terminal::columns() const { return size_of_window().ws_col; }
std::size_t Terminal::rows() const { return size_of_window().ws_row; }

void Terminal::show(const std::vector<std::string>& lines) const {
  std::string screen = "\033[H";
  for (std::size_t i = 0; i < lines.size(); ++i) {
    screen += lines[i] + "\033[K";
    if (i + 1 < lines.size()) screen += "\r\n";
  }
  write_all(screen + "\033[J");
}

Terminal::Event Terminal::wait(std::chrono::milliseconds time) const {
  const auto end = std::chrono::steady_clock::now() + time;
  for (;;) {
    if (ended != 0) return Event::kQuit;
    if (resized != 0) {
      resized = 0;
      return Event::kResize;
    }
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
    if (left.count() <= 0) return Event::kTime;
    pollfd input{STDIN_FILENO, POLLIN, 0};
    if (::poll(&input, 1, static_cast<int>(left.count())) <= 0) continue;
    char key = 0;
    constexpr char kControlC = 3;
    constexpr char kControlD = 4;
    const ssize_t got = ::read(STDIN_FILENO, &key, 1);
    if (got == 0 || key == 'q' || key == 'Q' || key == kControlC || key == kControlD) {
      return Event::kQuit;
    }
  }
}

}  // namespace kvtier::services
