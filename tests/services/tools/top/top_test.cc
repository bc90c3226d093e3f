#include "services/metrics/metrics_reading.h"
#include "tests/support/program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <pty.h>
#include <sstream>
#include <stdlib.h>
#include <string>
#include <vector>

namespace kvtier::services {
namespace {

using kvtier::testing::Program;
using ::testing::HasSubstr;

/// `kvtier top` in a terminal of its own.
class InTerminal {
 public:
  InTerminal(const std::vector<std::string>& arguments, unsigned short columns) {
    winsize size{24, columns, 0, 0};
    pid_ = ::forkpty(&terminal_, nullptr, nullptr, &size);
    if (pid_ != 0) return;
    std::vector<char*> argv;
    for (const std::string& argument : arguments) {
      argv.push_back(const_cast<char*>(argument.c_str()));
    }
    argv.push_back(nullptr);
    ::execv(KVTIER_BINARY, argv.data());
    ::_exit(127);
  }
  ~InTerminal() { ::close(terminal_); }
  InTerminal(const InTerminal&) = delete;  // owns a process
  InTerminal& operator=(const InTerminal&) = delete;

  /// Reads until `text` has come; what was read from the last call on.
  std::string read_until(const std::string& text) {
    std::string seen;
    char c = 0;
    while (seen.find(text) == std::string::npos && kvtier::testing::read_byte(terminal_, c))
      seen += c;
    return seen;
  }
  void resize(unsigned short columns) const {
    winsize size{24, columns, 0, 0};
    EXPECT_EQ(::ioctl(terminal_, TIOCSWINSZ, &size), 0);
  }
  void type(char key) const { EXPECT_EQ(::write(terminal_, &key, 1), 1); }
  void signal(int number) const { ::kill(pid_, number); }
  int wait() {
    read_until("\xff never sent");
    return kvtier::testing::wait_for_exit(pid_);
  }

 private:
  pid_t pid_ = -1;
  int terminal_ = -1;
};

class TopTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(KVTIER_BINARY)) GTEST_SKIP() << "no build on this machine";
    std::string pattern = ::testing::TempDir() + "kvtier-XXXXXX";
    folder_ = ::mkdtemp(pattern.data());
    admin_ = "unix:" + (folder_ / "admin.sock").string();
    metrics_ = "unix:" + (folder_ / "metrics.sock").string();
    server_ = std::make_unique<Program>(
        KVTIER_BINARY,
        std::vector<std::string>{"kvtier", "serve", "--backend", "cpu", "--listen",
                                 "unix:" + (folder_ / "x.sock").string(), "--admin-listen", admin_,
                                 "--metrics", metrics_},
        std::vector<std::string>{}, folder_ / "err");
    ASSERT_THAT(server_->read_line(), HasSubstr("listening on"));
    ASSERT_EQ(server_->read_line(), "metrics on " + metrics_);
  }
  void TearDown() override {
    server_.reset();
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }
  std::string err(const std::string& name) const {
    std::ostringstream text;
    text << std::ifstream(folder_ / name).rdbuf();
    return text.str();
  }

  std::filesystem::path folder_;
  std::string admin_, metrics_;
  std::unique_ptr<Program> server_;
};

TEST_F(TopTest, PrintsOneFrameOverGrpcAndOverHttp) {
  for (const auto& [option, address] : {std::pair{"--server", admin_}, {"--metrics", metrics_}}) {
    Program top(KVTIER_BINARY, {"kvtier", "top", option, address, "--once", "--interval", "0.1"},
                {}, folder_ / "top");
    EXPECT_THAT(top.read_line(), HasSubstr("serving")) << err("top");
    std::string all;
    for (int i = 0; i < 12; ++i) all += top.read_line() + '\n';
    EXPECT_THAT(all, HasSubstr("TENANT"));
    EXPECT_THAT(all, HasSubstr("default"));
    EXPECT_EQ(top.wait(), 0) << err("top");
  }
}

TEST_F(TopTest, PrintsAReadingAsJson) {
  for (const auto& [option, address] : {std::pair{"--server", admin_}, {"--metrics", metrics_}}) {
    Program top(KVTIER_BINARY, {"kvtier", "top", option, address, "--json"}, {}, folder_ / "top");
    EXPECT_EQ(MetricsReading::parse(top.read_line()).sum("kvtier_server_state"), 1) << err("top");
    EXPECT_EQ(top.wait(), 0) << err("top");
  }
}

TEST_F(TopTest, SaysWhyThereIsNothingToShow) {
  struct Case {
    std::vector<std::string> arguments;
    std::string message;
    int code = 1;
  };
  const std::string nowhere = "unix:" + (folder_ / "none.sock").string();
  for (const Case& c : std::vector<Case>{
           {{"--server", nowhere}, "expected AdminService at " + nowhere},
           {{"--metrics", nowhere}, "expected a page, found No such file"},
           {{"--server", "unix:" + (folder_ / "x.sock").string()}, "x.sock: try unix:", 2},
           {{"--metrics", "http://127.0.0.1:1/"}, "tcp:127.0.0.1:1"},
           {{"--server", "tcp:127.0.0.1:1"}, "expected unix:PATH", 2},
           {{"--server", "/x"}, "server: expected unix:PATH or tcp:HOST:PORT, found \"/x\"", 2},
           {{"--metrics", "/x"}, "metrics: expected unix:PATH or tcp:HOST:PORT, found \"/x\"", 2},
           {{"--server", admin_}, "expected a terminal, found none"}}) {
    std::vector<std::string> arguments{"kvtier", "top"};
    arguments.insert(arguments.end(), c.arguments.begin(), c.arguments.end());
    Program top(KVTIER_BINARY, arguments, {}, folder_ / "top");
    EXPECT_EQ(top.wait(), c.code) << c.message;
    EXPECT_THAT(err("top"), HasSubstr(c.message));
  }
}

TEST_F(TopTest, FindsTheAdminSocketBesideTheDefaultOne) {
  const std::vector<std::string> environment{"XDG_RUNTIME_DIR=" + folder_.string()};
  Program server(KVTIER_BINARY, {"kvtier", "serve", "--backend", "cpu"}, environment,
                 folder_ / "default");
  ASSERT_THAT(server.read_line(), HasSubstr("listening on")) << err("default");
  const std::string clients = "unix:" + (folder_ / "kvtier" / "kvtier.sock").string();
  Program wrong(KVTIER_BINARY, {"kvtier", "top", "--server", clients, "--json"}, environment,
                folder_ / "top");
  EXPECT_EQ(wrong.wait(), 2);
  EXPECT_THAT(err("top"),
              HasSubstr("found that of clients at " + clients + ": leave out --server"));
  Program right(KVTIER_BINARY, {"kvtier", "top", "--json"}, environment, folder_ / "top");
  EXPECT_EQ(MetricsReading::parse(right.read_line()).sum("kvtier_server_state"), 1) << err("top");
  EXPECT_EQ(right.wait(), 0);
}

TEST_F(TopTest, FillsATerminalUntilQIsPressed) {
  InTerminal top({"kvtier", "top", "--server", admin_, "--interval", "0.1"}, 100);
  EXPECT_THAT(top.read_until("TENANT"), HasSubstr("\033[?1049h"));
  top.read_until("operations 0/s");  // a rate: the second reading
  top.resize(20);
  std::string frame =
      "REFUSED";  // a title beyond column 20; frames from before may be on their way
  for (int i = 0; i < 1000 && frame.find("REFUSED") != std::string::npos; ++i) {
    top.read_until("\033[H");
    frame = top.read_until("\033[J");
  }
  EXPECT_THAT(frame, HasSubstr("TENANT"));
  EXPECT_THAT(frame, ::testing::Not(HasSubstr("REFUSED")));
  top.type('x');
  top.type('q');
  EXPECT_THAT(top.read_until("\033[?1049l"), HasSubstr("\033[?25h")) << "the screen is given back";
  EXPECT_EQ(top.wait(), 0);
}

TEST_F(TopTest, GivesTheTerminalBackWhenItIsEnded) {
  InTerminal top({"kvtier", "top", "--metrics", metrics_}, 80);
  top.read_until("TENANT");
  top.signal(SIGTERM);
  EXPECT_THAT(top.read_until("\033[?1049l"), HasSubstr("\033[?25h"));
  EXPECT_EQ(top.wait(), 0);
}

TEST_F(TopTest, EndsWithAnErrorWhenTheServerGoes) {
  InTerminal top({"kvtier", "top", "--metrics", metrics_, "--interval", "0.1"}, 80);
  top.read_until("TENANT");
  server_->signal(SIGKILL);
  (void)server_->wait();
  EXPECT_THAT(top.read_until("UNAVAILABLE"), HasSubstr("\033[?1049l"));
  EXPECT_EQ(top.wait(), 1);
}

}  // namespace
}  // namespace kvtier::services
