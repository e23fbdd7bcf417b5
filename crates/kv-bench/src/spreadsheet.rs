//! A table as CSV, and several as a spreadsheet (XLSX): plain cells in a ZIP archive, uncompressed.

use flate2::Crc;

/// A cell.
#[derive(Debug, Clone, PartialEq)]
pub enum Cell {
    /// No value.
    Empty,
    /// Text.
    Text(String),
    /// A number.
    Number(serde_json::Number),
    /// True or false.
    Truth(bool),
}

/// A table with a name.
#[derive(Debug, Clone, PartialEq)]
pub struct Sheet {
    /// The name.
    pub name: &'static str,
    /// Its rows. The first one names the columns.
    pub rows: Vec<Vec<Cell>>,
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<&serde_json::Value> for Cell {
    fn from(value: &serde_json::Value) -> Self {
        match value {
            serde_json::Value::Null => Self::Empty,
            serde_json::Value::Bool(truth) => Self::Truth(*truth),
            serde_json::Value::Number(number) => Self::Number(number.clone()),
            serde_json::Value::String(text) => Self::Text(text.clone()),
            other => Self::Text(other.to_string()),
        }
    }
}

impl Cell {
    /// As the original's CSV has it.
    fn csv(&self) -> String {
        match self {
            Self::Empty => String::new(),
            Self::Text(text) if text.contains([',', '"', '\n', '\r']) => {
                format!("\"{}\"", text.replace('"', "\"\""))
            }
            Self::Text(text) => text.clone(),
            Self::Number(number) => number.to_string(),
            Self::Truth(true) => "True".to_owned(),
            Self::Truth(false) => "False".to_owned(),
        }
    }

    fn xml(&self, place: &str) -> String {
        match self {
            Self::Empty => String::new(),
            Self::Text(text) => format!(
                "<c r=\"{place}\" t=\"inlineStr\"><is><t xml:space=\"preserve\">{}</t></is></c>",
                escaped(text)
            ),
            Self::Number(number) => format!("<c r=\"{place}\"><v>{number}</v></c>"),
            Self::Truth(truth) => {
                format!("<c r=\"{place}\" t=\"b\"><v>{}</v></c>", u8::from(*truth))
            }
        }
    }
}

/// The rows of a table as CSV.
pub fn csv(rows: &[Vec<Cell>]) -> String {
    let lines = rows.iter().map(|row| {
        let cells: Vec<String> = row.iter().map(Cell::csv).collect();
        cells.join(",") + "\n"
    });
    lines.collect()
}

/// A spreadsheet as a file of the Office Open XML format.
pub fn xlsx(sheets: &[Sheet]) -> Vec<u8> {
    let numbered = || (1..).zip(sheets);
    let part = |number: usize| format!("worksheets/sheet{number}.xml");
    let all = |text: &dyn Fn((usize, &Sheet)) -> String| -> String {
        numbered().map(text).collect::<Vec<_>>().concat()
    };
    let types = all(&|(number, _)| {
        let part = part(number);
        format!("<Override PartName=\"/xl/{part}\" ContentType=\"{TYPE}worksheet+xml\"/>")
    });
    let names = all(&|(number, sheet)| {
        let name = escaped(sheet.name);
        format!("<sheet name=\"{name}\" sheetId=\"{number}\" r:id=\"rId{number}\"/>")
    });
    let relations = all(&|(number, _)| relation(number, "worksheet", &part(number)));
    let mut archive = Archive::default();
    archive.add(
        "[Content_Types].xml",
        &format!(
            "<Types xmlns=\"{PACKAGE}content-types\"><Default Extension=\"rels\" ContentType=\
             \"application/vnd.openxmlformats-package.relationships+xml\"/><Default \
             Extension=\"xml\" ContentType=\"application/xml\"/><Override \
             PartName=\"/xl/workbook.xml\" ContentType=\"{TYPE}sheet.main+xml\"/>{types}</Types>"
        ),
    );
    archive.add("_rels/.rels", &relationships(&relation(1, "officeDocument", "xl/workbook.xml")));
    archive.add(
        "xl/workbook.xml",
        &format!(
            "<workbook xmlns=\"{MAIN}\" xmlns:r=\"{OFFICE}\"><sheets>{names}</sheets></workbook>"
        ),
    );
    archive.add("xl/_rels/workbook.xml.rels", &relationships(&relations));
    for (number, sheet) in numbered() {
        archive.add(&format!("xl/worksheets/sheet{number}.xml"), &worksheet(sheet));
    }
    archive.finish()
}

const TYPE: &str = "application/vnd.openxmlformats-officedocument.spreadsheetml.";
const PACKAGE: &str = "http://schemas.openxmlformats.org/package/2006/";
const MAIN: &str = "http://schemas.openxmlformats.org/spreadsheetml/2006/main";
const OFFICE: &str = "http://schemas.openxmlformats.org/officeDocument/2006/relationships";

fn relation(number: usize, kind: &str, target: &str) -> String {
    format!("<Relationship Id=\"rId{number}\" Type=\"{OFFICE}/{kind}\" Target=\"{target}\"/>")
}

fn relationships(all: &str) -> String {
    format!("<Relationships xmlns=\"{PACKAGE}relationships\">{all}</Relationships>")
}

/// The first column is as wide as the names of metrics in it.
fn worksheet(sheet: &Sheet) -> String {
    let rows = (1..).zip(&sheet.rows).map(|(number, row): (usize, _)| {
        let cells = row.iter().enumerate();
        let cells = cells.map(|(at, cell)| cell.xml(&format!("{}{number}", column(at))));
        format!("<row r=\"{number}\">{}</row>", cells.collect::<Vec<_>>().concat())
    });
    format!(
        "<worksheet xmlns=\"{MAIN}\"><cols><col min=\"1\" max=\"1\" width=\"42\" \
         customWidth=\"1\"/></cols><sheetData>{}</sheetData></worksheet>",
        rows.collect::<Vec<_>>().concat()
    )
}

/// The letters of a column: A to Z, AA to AZ, and so on.
fn column(mut at: usize) -> String {
    const LETTERS: &[u8; 26] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ";
    let mut letters = String::new();
    loop {
        letters.insert(0, char::from(LETTERS[at % 26]));
        if at < 26 {
            return letters;
        }
        at = at / 26 - 1;
    }
}

/// Text in XML, which has no control characters.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\t' | '\n' => escaped.push(letter),
            _ if letter.is_control() || matches!(letter, '\u{fffe}' | '\u{ffff}') => {
                escaped.push('\u{fffd}');
            }
            _ => escaped.push(letter),
        }
    }
    escaped
}

/// A ZIP archive of files that are stored as they are.
#[derive(Debug, Default)]
struct Archive {
    bytes: Vec<u8>,
    directory: Vec<u8>,
    files: u16,
}

impl Archive {
    fn add(&mut self, name: &str, xml: &str) {
        let text = format!("<?xml version=\"1.0\" encoding=\"UTF-8\" standalone=\"yes\"?>\n{xml}");
        let mut crc = Crc::new();
        crc.update(text.as_bytes());
        // A spreadsheet of a run has some kilobytes.
        let narrow = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let (length, offset) = (narrow(text.len()), narrow(self.bytes.len()));
        let name_length = u16::try_from(name.len()).unwrap_or(u16::MAX);
        // Version 2.0, no flags, stored; midnight of 1980-01-01; checksum, both sizes, the name.
        let mut facts = Vec::new();
        for number in [20_u16, 0, 0, 0, 0x21] {
            facts.extend(number.to_le_bytes());
        }
        for number in [crc.sum(), length, length] {
            facts.extend(number.to_le_bytes());
        }
        facts.extend(name_length.to_le_bytes());
        facts.extend([0; 2]);
        self.bytes.extend(b"PK\x03\x04");
        self.bytes.extend(&facts);
        self.bytes.extend(name.as_bytes());
        self.bytes.extend(text.as_bytes());
        self.directory.extend(b"PK\x01\x02\x14\x00");
        self.directory.extend(&facts);
        // No comment, the first disk, no attributes.
        self.directory.extend([0; 10]);
        self.directory.extend(offset.to_le_bytes());
        self.directory.extend(name.as_bytes());
        self.files += 1;
    }

    fn finish(mut self) -> Vec<u8> {
        let narrow = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let (length, offset) = (narrow(self.directory.len()), narrow(self.bytes.len()));
        self.bytes.extend(&self.directory);
        self.bytes.extend(b"PK\x05\x06\x00\x00\x00\x00");
        self.bytes.extend(self.files.to_le_bytes());
        self.bytes.extend(self.files.to_le_bytes());
        self.bytes.extend(length.to_le_bytes());
        self.bytes.extend(offset.to_le_bytes());
        self.bytes.extend([0; 2]);
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn columns_are_counted_in_letters() {
        for (at, letters) in [(0, "A"), (25, "Z"), (26, "AA"), (51, "AZ"), (53, "BB"), (702, "AAA")]
        {
            assert_eq!(column(at), letters);
        }
    }

    #[test]
    fn a_table_as_csv_is_quoted_where_it_has_to_be() {
        let values = [json!("a,b"), json!("say \"x\""), json!(null), json!(1.5), json!(true)];
        let row: Vec<Cell> = values.iter().map(Cell::from).collect();
        assert_eq!(csv(&[row]), "\"a,b\",\"say \"\"x\"\"\",,1.5,True\n");
    }

    fn numbers(bytes: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    /// The directory at the end leads to each file, whose checksum is right.
    #[test]
    fn a_spreadsheet_is_an_archive_whose_directory_is_right() {
        let text = Cell::from("a < b & \"c\"\u{1}");
        let number = Cell::from(&json!(-1.25));
        let rows = vec![vec![text, Cell::Empty, number, Cell::Truth(true)]];
        let bytes = xlsx(&[Sheet { name: "One", rows: rows.clone() }, Sheet { name: "Two", rows }]);
        let end = bytes.len() - 22;
        assert_eq!(&bytes[end..end + 4], b"PK\x05\x06");
        assert_eq!(bytes[end + 10], 6);
        let mut at = numbers(&bytes, end + 16) as usize;
        let mut files = Vec::new();
        while at < end {
            let name_length = usize::from(bytes[at + 28]);
            let name = &bytes[at + 46..at + 46 + name_length];
            let local = numbers(&bytes, at + 42) as usize;
            assert_eq!(&bytes[local..local + 4], b"PK\x03\x04");
            assert_eq!(&bytes[local + 30..local + 30 + name_length], name);
            let from = local + 30 + name_length;
            let content = &bytes[from..from + numbers(&bytes, at + 20) as usize];
            let mut crc = Crc::new();
            crc.update(content);
            assert_eq!(crc.sum(), numbers(&bytes, at + 16));
            let content = String::from_utf8(content.to_vec()).unwrap();
            files.push((String::from_utf8(name.to_vec()).unwrap(), content));
            at += 46 + name_length;
        }
        assert_eq!(files.len(), 6);
        let (name, sheet) = &files[5];
        assert_eq!(name, "xl/worksheets/sheet2.xml");
        assert!(sheet.contains(">a &lt; b &amp; &quot;c&quot;\u{fffd}</t>"), "{sheet}");
        assert!(sheet.contains("<c r=\"C1\"><v>-1.25</v></c><c r=\"D1\" t=\"b\"><v>1</v></c>"));
        assert!(!sheet.contains("r=\"B1\""));
    }
}
