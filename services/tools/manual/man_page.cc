#include "kvtier/error.h"

#include "services/tools/manual/manual.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cctype>

namespace kvtier::services {
namespace {

/// Returns text in which roff sees no request and no hyphen that it may change.
std::string roff(const std::string& text) {
  using CLI::detail::find_and_replace;
  std::string result = find_and_replace(find_and_replace(text, "\\", "\\e"), "-", "\\-");
  if (result.starts_with('.') || result.starts_with('\'')) result.insert(0, "\\&");
  return result;
}

std::string upper(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return std::toupper(c); });
  return text;
}

std::string tag(const OptionText& option) {
  std::string text;
  for (const std::string& flag : option.flags) {
    text += (text.empty() ? "\\fB" : ", \\fB") + roff(flag) + "\\fR";
  }
  if (option.flags.empty()) return "\\fI" + roff(option.name) + "\\fR";
  if (!option.type.empty()) text += " \\fI" + roff(option.type) + "\\fR";
  return text;
}

void add_option(const OptionText& option, std::string& text) {
  text += ".TP\n" + tag(option) + '\n' + roff(option.description);
  if (!option.values.empty()) {
    text += "\n.br\nOne of: " + roff(CLI::detail::join(option.values, ", ")) + '.';
  }
  if (!option.range.empty()) text += "\n.br\nRange: " + roff(option.range) + '.';
  if (!option.default_value.empty()) text += "\n.br\nDefault: " + roff(option.default_value) + '.';
  if (!option.environment.empty()) text += "\n.br\nEnvironment: " + roff(option.environment) + '.';
  text += '\n';
}

}  // namespace

std::string man_page(const CommandText& program, const std::string& command,
                     const std::string& version) {
  const CommandText* page = &program;
  if (!command.empty()) {
    const auto found = std::ranges::find(program.commands, command, &CommandText::name);
    if (found == program.commands.end()) {
      throw Error(ErrorCode::kNotFound, "man: expected a command, found " + command);
    }
    page = &*found;
  }
  const std::string name = command.empty() ? program.name : program.name + "-" + command;
  const std::string own_name = program.name + ": ";  // `--help` begins with it
  const std::string summary = page->description.starts_with(own_name)
                                  ? page->description.substr(own_name.size())
                                  : page->description;
  std::string text = ".TH " + upper(name) + " 1 \"\" \"" + version +
                     "\" \"User Commands\"\n.SH NAME\n" + roff(name) + " \\- " + roff(summary) +
                     "\n.SH SYNOPSIS\n.B " + program.name + (command.empty() ? "" : " " + command) +
                     '\n';
  for (const OptionText& option : page->options) {
    if (option.required && !option.flags.empty()) text += tag(option) + ' ';
  }
  text += "[\\fIOPTION\\fR]...";
  if (!page->commands.empty()) text += " \\fICOMMAND\\fR [\\fIARGUMENT\\fR]...";
  for (const OptionText& option : page->options) {
    if (!option.flags.empty()) continue;
    const std::string argument = "\\fI" + roff(option.name) + "\\fR";
    text += option.required ? " " + argument : " [" + argument + "]";
  }
  text += '\n';
  if (!page->commands.empty()) {
    text += ".SH COMMANDS\n";
    for (const CommandText& child : page->commands) {
      text += ".TP\n\\fB" + roff(child.name) + "\\fR\n" + roff(child.description) + '\n';
    }
  }
  text += ".SH OPTIONS\n";
  for (const OptionText& option : page->options) add_option(option, text);
  text +=
      ".SH EXIT STATUS\n0: success. 1: an error, printed as \"error: CODE: message\". 2: a "
      "command line that is not understood, or a value or a file that is refused "
      "(INVALID_ARGUMENT, NOT_FOUND). 3: of plan, that the model does not fit. Of serve: 70: the "
      "GPU is lost. 75: draining hung. 130: interrupted; of serve: by a second signal. "
      "docs/faq.md of the sources says more.\n.SH SEE ALSO\n";
  std::string others;
  if (!command.empty()) others += ".BR " + roff(program.name) + " (1)\n";
  for (const CommandText& child : page->commands) {
    others += ".BR " + roff(program.name + "-" + child.name) + " (1)\n";
  }
  return text + others;
}

}  // namespace kvtier::services
