//! The width of the help: that of the terminal, also for texts that the source wraps.

use clap::Command;

/// Widest help. Longer lines are hard to read.
const WIDTH_MAX: usize = 100;
/// Least width that a terminal can have for help to be fitted to it.
const WIDTH_MIN: usize = 20;

/// Fits the help of a command and of those below it to the terminal.
pub(super) fn fit(command: Command) -> Command {
    let command = with_whole_paragraphs(command).max_term_width(WIDTH_MAX);
    match terminal_width() {
        Some(width) => command.term_width(width.min(WIDTH_MAX)),
        // The value of COLUMNS, or the widest.
        None => command,
    }
}

/// The columns of the terminal. Clap does not see those of one that reports no rows, such as a new
/// pseudo-terminal.
fn terminal_width() -> Option<usize> {
    let (output, errors) = (std::io::stdout(), std::io::stderr());
    let sizes = [rustix::termios::tcgetwinsize(output), rustix::termios::tcgetwinsize(errors)];
    let columns = sizes.into_iter().flatten().map(|size| usize::from(size.ws_col));
    columns.filter(|columns| *columns >= WIDTH_MIN).max()
}

/// Joins the lines that the source wraps, so that clap wraps them at the width of the terminal.
fn with_whole_paragraphs(mut command: Command) -> Command {
    if let Some(text) = command.get_after_help().map(ToString::to_string) {
        command = command.after_help(joined(&text));
    }
    let names: Vec<String> =
        command.get_subcommands().map(|child| child.get_name().to_owned()).collect();
    for name in names {
        command = command.mut_subcommand(name, with_whole_paragraphs);
    }
    command
}

/// Joins lines of prose with the same indentation. A command line stays on its own.
fn joined(text: &str) -> String {
    let mut lines: Vec<String> = Vec::new();
    let mut is_open = false;
    for line in text.lines() {
        let prose = is_prose(line);
        match lines.last_mut() {
            Some(last) if is_open && prose && indent(last) == indent(line) => {
                last.push(' ');
                last.push_str(line.trim_start());
            }
            last => {
                let is_continuation = last.is_some_and(|last| last.ends_with('\\'));
                lines.push(line.to_owned());
                is_open = prose && !is_continuation;
            }
        }
    }
    lines.join("\n")
}

/// Examples are indented by two, what they mean by six.
fn is_prose(line: &str) -> bool {
    !line.trim().is_empty() && indent(line) != 2 && !line.ends_with('\\')
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prose_is_joined_and_commands_are_not() {
        let text = "Examples:\n  cascade a \\\n      --b\n      One\n      two.\n  cascade c\n  \
                    cascade d\n\nMore\nprose.";
        let expected = "Examples:\n  cascade a \\\n      --b\n      One two.\n  cascade c\n  \
                        cascade d\n\nMore prose.";
        assert_eq!(joined(text), expected);
    }

    /// Texts after the options were wrapped at 100 columns, whatever the terminal.
    #[test]
    fn help_fits_the_width_of_the_terminal() {
        fn check(command: &mut Command, width: usize) {
            let help = command.render_long_help().to_string();
            for line in help.lines().filter(|line| line.chars().count() > width) {
                let words = line.split_whitespace().map(|word| word.chars().count());
                let longest = words.max().unwrap_or(0) + indent(line);
                assert!(longest > width, "{}: {line:?}", command.get_name());
            }
            command.get_subcommands_mut().for_each(|child| check(child, width));
        }
        for width in [60, 80, WIDTH_MAX] {
            let mut command = crate::definition().term_width(width);
            command.build();
            check(&mut command, width);
        }
        let mut narrow = crate::definition().term_width(60);
        let help = narrow.render_long_help().to_string();
        let (_, codes) = help.split_once("Exit codes:").expect("the end of the help");
        let lines: Vec<_> = codes.trim_end().lines().collect();
        let (last, full) = lines.split_last().expect("several lines");
        assert!(full.iter().skip(1).all(|line| line.len() > 40), "{codes}");
        assert!(last.len() <= 60, "{codes}");
    }
}
