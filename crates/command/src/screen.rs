//! The output of a command: results to standard output, notices to standard error.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

use cascade_node::telemetry::json_line;

use crate::Failure;

/// The standard streams of the process. All output of a command goes through it. A closed pipe
/// (`| head`) is not an error.
pub struct Screen {
    results: Box<dyn Write + Send>,
    notices: Box<dyn Write + Send>,
    /// Whether standard error is a terminal, where a progress bar can be drawn.
    pub is_interactive: bool,
    /// Whether results may be coloured.
    pub is_coloured: bool,
    /// Whether a failure is printed as a line of JSON, as a node with a log in JSON does.
    pub has_json_notices: bool,
}

impl fmt::Debug for Screen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Screen")
            .field("is_interactive", &self.is_interactive)
            .finish_non_exhaustive()
    }
}

impl Screen {
    /// The streams of the process. Respects `NO_COLOR` and `CLICOLOR`.
    pub fn of_process() -> Self {
        Self {
            results: Box::new(io::stdout()),
            notices: Box::new(io::stderr()),
            is_interactive: io::stderr().is_terminal(),
            is_coloured: console::colors_enabled(),
            has_json_notices: false,
        }
    }

    /// Writes a line of the result.
    pub fn line(&mut self, text: impl fmt::Display) -> Result<(), Failure> {
        let written = writeln!(self.results, "{text}");
        written.or_else(ignore_closed_pipe).map_err(|source| Failure::write("-", source))
    }

    /// Writes bytes as they are, without a newline.
    pub fn bytes(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let written = self.results.write_all(bytes).and_then(|()| self.results.flush());
        written.or_else(ignore_closed_pipe).map_err(|source| Failure::write("-", source))
    }

    /// Writes a line that is not part of the result, such as progress or an error.
    pub fn notice(&mut self, text: impl fmt::Display) -> Result<(), Failure> {
        let written = writeln!(self.notices, "{text}");
        written.or_else(ignore_closed_pipe).map_err(|source| Failure::write("-", source))
    }

    /// Writes the failure of a command.
    pub fn failure(&mut self, failure: &Failure) -> Result<(), Failure> {
        let text = failure.explain();
        if self.has_json_notices {
            return self.notice(json_line("ERROR", &text));
        }
        self.notice(text)
    }

    /// Text in bold, if results are coloured.
    pub fn bold(&self, text: &str) -> String {
        self.style(console::Style::new().bold(), text)
    }

    /// Text in a lighter shade, if results are coloured.
    pub fn dim(&self, text: &str) -> String {
        self.style(console::Style::new().dim(), text)
    }

    /// Text in green for good or red for bad, if results are coloured.
    pub fn verdict(&self, is_good: bool, text: &str) -> String {
        let style = console::Style::new();
        self.style(if is_good { style.green() } else { style.red().bold() }, text)
    }

    fn style(&self, style: console::Style, text: &str) -> String {
        style.force_styling(self.is_coloured).apply_to(text).to_string()
    }
}

fn ignore_closed_pipe(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::BrokenPipe { Ok(()) } else { Err(error) }
}

/// Writes a value as JSON to a file, or to standard output for `-`.
pub fn write_json<T>(path: &Path, value: &T, screen: &mut Screen) -> Result<(), Failure>
where
    T: serde::Serialize + ?Sized,
{
    let text = serde_json::to_string_pretty(value);
    let text = text.map_err(|error| Failure::write(path, io::Error::other(error)))?;
    if path.as_os_str() == "-" { screen.line(text) } else { write_file(path, text.as_bytes()) }
}

/// Writes a file under a temporary name and renames it, so that readers never see half of it.
///
/// Devices and pipes (`/dev/stdout`) are written directly, because a rename would replace them.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let mut file = PendingFile::create(path)?;
    let written = file.file.write_all(bytes);
    written.map_err(|source| Failure::write(path, source))?;
    file.keep()
}

/// A file that has a temporary name until it is complete. Dropping it removes it.
#[derive(Debug)]
pub(crate) struct PendingFile {
    path: PathBuf,
    /// `None` for devices and pipes, and once it is complete.
    temporary: Option<PathBuf>,
    file: File,
}

impl PendingFile {
    /// Creates a file, and the directories above it.
    pub(crate) fn create(path: &Path) -> Result<Self, Failure> {
        let create = || -> io::Result<Self> {
            let is_special = path.metadata().is_ok_and(|target| !target.is_file());
            if is_special {
                let file = OpenOptions::new().write(true).open(path)?;
                return Ok(Self { path: path.to_owned(), temporary: None, file });
            }
            if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
                std::fs::create_dir_all(parent)?;
            }
            let (temporary, file) = create_beside(path)?;
            Ok(Self { path: path.to_owned(), temporary: Some(temporary), file })
        };
        create().map_err(|source| Failure::write(path, source))
    }

    /// The file, to write to it.
    pub(crate) fn writer(&self) -> Result<File, Failure> {
        self.file.try_clone().map_err(|source| Failure::write(&self.path, source))
    }

    /// Gives the complete file its name. One that has this name is replaced.
    pub(crate) fn keep(mut self) -> Result<(), Failure> {
        let Some(temporary) = &self.temporary else { return Ok(()) };
        let renamed = std::fs::rename(temporary, &self.path);
        renamed.map_err(|source| Failure::write(&self.path, source))?;
        self.temporary = None;
        Ok(())
    }
}

impl Drop for PendingFile {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            // A full disk leaves a part of the file, which would keep the space. The first error is
            // the one to report.
            drop(std::fs::remove_file(temporary));
        }
    }
}

/// Creates a file of its own beside a path: a file or a link that is there already, perhaps another
/// user's, is not written to.
fn create_beside(path: &Path) -> io::Result<(PathBuf, File)> {
    let mut number = 0;
    loop {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{}-{number}.part", std::process::id()));
        let created = OpenOptions::new().write(true).create_new(true).open(&name);
        match created {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && number < 100 => {
                number += 1;
            }
            created => return Ok((name.into(), created?)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_link_that_was_planted_is_replaced_and_its_target_stays() {
        let directory = tempfile::tempdir().unwrap();
        let (path, target) = (directory.path().join("report"), directory.path().join("target"));
        fs::write(&target, "of another user").unwrap();
        let first = directory.path().join(format!("report.{}-0.part", std::process::id()));
        for planted in [&path, &first] {
            symlink(&target, planted).unwrap();
        }
        assert!(write_file(&path, b"a report").is_ok());
        assert_eq!(fs::read_to_string(&path).unwrap(), "a report");
        assert_eq!(fs::read_to_string(&target).unwrap(), "of another user");
        // The report, the link in the place of its temporary file, and the target.
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 3);
    }
}
