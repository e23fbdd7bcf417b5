//! CSV with the fields of Mooncake's format as columns; `hash_ids` is a list in quotes.

use serde_json::{Map, Value};

use super::input::Lines;
use super::{Parser, TraceError, mooncake};

/// The columns of a trace.
const COLUMNS: [&str; 4] = ["timestamp", "input_length", "output_length", "hash_ids"];

/// The columns that a first line names, unless it begins a JSON object.
pub(super) fn header(line: &[u8]) -> Option<Vec<String>> {
    let text = std::str::from_utf8(line).ok()?.trim();
    if text.starts_with(['{', '[']) || !text.contains([',', ';', '\t']) {
        return None;
    }
    let cells = cells(text)?;
    Some(cells.iter().map(|cell| cell.trim().to_owned()).collect())
}

pub(super) fn parse(
    parser: &mut Parser,
    lines: &mut Lines<'_>,
    columns: &[String],
) -> Result<(), TraceError> {
    let file = lines.file;
    if let Some(missing) = COLUMNS.iter().find(|name| !columns.iter().any(|one| one == *name)) {
        const SHOWN_MAX: usize = 300;
        return Err(TraceError::Unsupported {
            file: file.to_owned(),
            found: format!(
                "CSV with the columns {}, without {missing}",
                columns.join(", ").chars().take(SHOWN_MAX).collect::<String>()
            ),
            advice: format!("expected the columns {}, separated by commas", COLUMNS.join(", ")),
        });
    }
    while let Some(line) = lines.next_line()? {
        let number = lines.line;
        let damage =
            |reason: String| TraceError::Row { file: file.to_owned(), line: number, reason };
        let text = std::str::from_utf8(&line).map_err(|error| damage(error.to_string()))?;
        let cells = cells(text.trim_end_matches(['\r', '\n']))
            .ok_or_else(|| damage("a quoted cell does not end".to_owned()))?;
        if cells.len() != columns.len() {
            return Err(damage(format!("{} cells for {} columns", cells.len(), columns.len())));
        }
        let fields = columns.iter().zip(&cells).map(|(name, cell)| (name.clone(), value(cell)));
        let row = Value::Object(fields.collect::<Map<_, _>>());
        let request = mooncake::request(parser, file, number, &row)?;
        parser.requests.push(request);
    }
    Ok(())
}

/// A cell as JSON: a number or a list if it is one, nothing if it is empty, else text.
fn value(cell: &str) -> Value {
    match cell.trim() {
        "" => Value::Null,
        text => serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned())),
    }
}

/// The cells of a line. In quotes, a comma belongs to the cell, and two quotes are one. `None` if
/// the quotes do not end.
fn cells(line: &str) -> Option<Vec<String>> {
    let mut cells = vec![String::new()];
    let mut is_quoted = false;
    let mut characters = line.chars().peekable();
    while let Some(character) = characters.next() {
        let cell = cells.last_mut().expect("there is always one cell");
        match character {
            '"' if is_quoted && characters.peek() == Some(&'"') => {
                characters.next();
                cell.push('"');
            }
            '"' => is_quoted = !is_quoted,
            ',' if !is_quoted => cells.push(String::new()),
            other => cell.push(other),
        }
    }
    (!is_quoted).then_some(cells)
}
