//! A file of settings in YAML or JSON as a tree, whose errors name the file, the field and the form
//! that is expected.

use std::fmt::Display;
use std::fs::File;
use std::io::Read;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::KvBenchError;

/// Largest file. A model's configuration has some KiB.
const BYTES_MAX: u64 = 1 << 20;

/// A file of settings.
#[derive(Debug, Clone)]
pub struct SettingsFile {
    option: &'static str,
    path: PathBuf,
    root: Map<String, Value>,
}

/// Named values of a file: all of it, or those below a name.
#[derive(Debug, Clone, Copy)]
pub struct Section<'a> {
    file: &'a SettingsFile,
    /// Names above it.
    above: Option<(&'a Section<'a>, &'a str)>,
    values: &'a Map<String, Value>,
}

impl SettingsFile {
    /// Reads a file. `option` is the one that names it.
    ///
    /// # Errors
    /// If it cannot be read, or is neither YAML nor JSON with named values.
    pub fn read(option: &'static str, path: &Path) -> Result<Self, KvBenchError> {
        let mut text = String::new();
        let opened =
            File::open(path).and_then(|file| file.take(BYTES_MAX + 1).read_to_string(&mut text));
        opened.map_err(|source| KvBenchError::Settings {
            option,
            path: path.to_owned(),
            source,
        })?;
        if text.len() as u64 > BYTES_MAX {
            return Err(KvBenchError::usage(
                format!("{option} {}: more than 1 MiB is no file of settings", path.display()),
                "give a file in YAML or JSON",
            ));
        }
        Self::parse(option, path, &text)
    }

    fn parse(option: &'static str, path: &Path, text: &str) -> Result<Self, KvBenchError> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let is_json = text.trim_start().starts_with('{');
        let parsed = if is_json {
            serde_json::from_str(text).map_err(|error| error.to_string())
        } else {
            // As in YAML 1.2: only `true` and `false` are no texts.
            let options = serde_saphyr::options! { strict_booleans: true };
            let parsed = serde_saphyr::from_str_with_options(text, options);
            parsed.map_err(|error| error.without_snippet().to_string())
        };
        let language = if is_json { "JSON" } else { "YAML" };
        let refused = |why: &dyn Display| {
            KvBenchError::usage(
                format!("{option} {}: cannot be read as {language}: {why}", path.display()),
                "mend the file; it is YAML, or JSON if it begins with {",
            )
        };
        match parsed.map_err(|why| refused(&why))? {
            Value::Object(root) => Ok(Self { option, path: path.to_owned(), root }),
            _ => Err(refused(&"there are no named values at its top")),
        }
    }

    /// All of it.
    pub fn section(&self) -> Section<'_> {
        Section { file: self, above: None, values: &self.root }
    }

    /// An error of the whole file.
    pub fn error(&self, what: impl Display, advice: impl Into<String>) -> KvBenchError {
        KvBenchError::usage(format!("{} {}: {what}", self.option, self.path.display()), advice)
    }
}

impl<'a> Section<'a> {
    /// The names in it, in the order of the alphabet.
    pub fn names(&self) -> impl Iterator<Item = &'a str> {
        self.values.keys().map(String::as_str)
    }

    /// Whether it has a value of this name that is not null.
    pub fn has(&self, name: &str) -> bool {
        self.value(name).is_some()
    }

    fn value(&self, name: &str) -> Option<&'a Value> {
        self.values.get(name).filter(|value| !value.is_null())
    }

    /// A name with those above it: `model_configs.mine.num_layers`.
    pub fn path(&self, name: &str) -> String {
        match self.above {
            None => name.to_owned(),
            Some((above, own)) => format!("{}.{name}", above.path(own)),
        }
    }

    /// An error of one field.
    pub fn error(&self, name: &str, what: impl Display, advice: impl Into<String>) -> KvBenchError {
        self.file.error(format!("field `{}`: {what}", self.path(name)), advice)
    }

    fn expected(&self, name: &str, form: impl Display, found: &Value) -> KvBenchError {
        let mut found = found.to_string();
        if found.chars().count() > 60 {
            found = found.chars().take(60).chain("...".chars()).collect();
        }
        let what = format!("expected {form}, found {found}");
        self.error(name, what, "change it in the file")
    }

    /// The error of a field that has to be there.
    pub fn missing(&self, name: &str, form: impl Display) -> KvBenchError {
        self.error(name, format!("missing; expected {form}"), "add it to the file")
    }

    /// Refuses names that are not among these.
    ///
    /// # Errors
    /// If there is another name.
    pub fn check_names(&self, known: &[&str]) -> Result<(), KvBenchError> {
        match self.names().find(|name| !known.contains(name)) {
            None => Ok(()),
            Some(name) => Err(self.error(
                name,
                "there is no such setting",
                format!("take it out; the settings here are {}", known.join(", ")),
            )),
        }
    }

    /// The section below a name, if it is there.
    ///
    /// # Errors
    /// If it is not a section.
    pub fn below<'b>(&'b self, name: &'b str) -> Result<Option<Section<'b>>, KvBenchError> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::Object(values)) => {
                Ok(Some(Section { file: self.file, above: Some((self, name)), values }))
            }
            Some(other) => Err(self.expected(name, "named values below it", other)),
        }
    }

    /// A whole number within bounds, if it is there.
    ///
    /// # Errors
    /// If it is something else.
    pub fn whole(
        &self,
        name: &str,
        bounds: RangeInclusive<u64>,
    ) -> Result<Option<u64>, KvBenchError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let number = value.as_u64().filter(|number| bounds.contains(number));
        let form = format!("a whole number from {} to {}", bounds.start(), bounds.end());
        number.map(Some).ok_or_else(|| self.expected(name, form, value))
    }

    /// A number within bounds, if it is there.
    ///
    /// # Errors
    /// If it is something else.
    pub fn number(
        &self,
        name: &str,
        bounds: RangeInclusive<f64>,
    ) -> Result<Option<f64>, KvBenchError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let number = value.as_f64().filter(|number| bounds.contains(number));
        let form = format!("a number from {} to {}", bounds.start(), bounds.end());
        number.map(Some).ok_or_else(|| self.expected(name, form, value))
    }

    /// Two whole numbers within bounds, the smaller one first, if they are there.
    ///
    /// # Errors
    /// If it is something else.
    pub fn whole_range(
        &self,
        name: &str,
        bounds: RangeInclusive<u64>,
    ) -> Result<Option<(u64, u64)>, KvBenchError> {
        self.ordered(name, "two whole numbers", &bounds, Value::as_u64)
    }

    /// Two numbers within bounds, the smaller one first, if they are there.
    ///
    /// # Errors
    /// If it is something else.
    pub fn range(
        &self,
        name: &str,
        bounds: RangeInclusive<f64>,
    ) -> Result<Option<(f64, f64)>, KvBenchError> {
        self.ordered(name, "two numbers", &bounds, Value::as_f64)
    }

    fn ordered<T: Copy + PartialOrd + Display>(
        &self,
        name: &str,
        what: &str,
        bounds: &RangeInclusive<T>,
        read: fn(&Value) -> Option<T>,
    ) -> Result<Option<(T, T)>, KvBenchError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let all: Option<Vec<T>> = value.as_array().and_then(|all| all.iter().map(read).collect());
        let is_within = |it: &T| bounds.contains(it);
        match all.as_deref() {
            Some([least, most]) if is_within(least) && is_within(most) && least <= most => {
                Ok(Some((*least, *most)))
            }
            _ => {
                let (from, to) = (bounds.start(), bounds.end());
                let form = format!("{what} from {from} to {to}, the smaller one first");
                Err(self.expected(name, form, value))
            }
        }
    }

    /// A text, if it is there.
    ///
    /// # Errors
    /// If it is something else.
    pub fn text(&self, name: &str) -> Result<Option<&'a str>, KvBenchError> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.expected(name, "a text", other)),
        }
    }

    /// A list of texts, if it is there.
    ///
    /// # Errors
    /// If it is something else.
    pub fn texts(&self, name: &str) -> Result<Option<Vec<&'a str>>, KvBenchError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let texts = value.as_array().and_then(|all| all.iter().map(Value::as_str).collect());
        texts.map(Some).ok_or_else(|| self.expected(name, "a list of texts", value))
    }

    /// Whether a flag is set. A missing one is not.
    ///
    /// # Errors
    /// If it is something else.
    pub fn flag(&self, name: &str) -> Result<bool, KvBenchError> {
        match self.value(name) {
            None => Ok(false),
            Some(Value::Bool(is_set)) => Ok(*is_set),
            Some(other) => Err(self.expected(name, "true or false", other)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<SettingsFile, String> {
        let parsed = SettingsFile::parse("--config", Path::new("a.yaml"), text);
        parsed.map_err(|error| error.to_string())
    }

    #[test]
    fn yaml_and_json_are_read_alike() {
        let yaml = parse("# a comment\na:\n  b: 3\n  c: [x, y]\nd: 0.5\n").unwrap();
        let json =
            parse("\u{feff} {\"a\": {\"b\": 3, \"c\": [\"x\", \"y\"]}, \"d\": 0.5}").unwrap();
        for file in [yaml, json] {
            let top = file.section();
            let a = top.below("a").unwrap().unwrap();
            assert_eq!(a.whole("b", 0..=9).unwrap(), Some(3));
            assert_eq!(a.texts("c").unwrap(), Some(vec!["x", "y"]));
            assert_eq!(top.number("d", 0.0..=1.0).unwrap(), Some(0.5));
            assert_eq!((top.has("a"), top.has("e")), (true, false));
            assert_eq!(a.names().collect::<Vec<_>>(), ["b", "c"]);
        }
    }

    #[test]
    fn an_error_names_the_file_the_field_and_the_form() {
        let file = parse("a:\n  b: many\n  c: 2.5\n  d: -1\ne: 3\nf: null\n").unwrap();
        let top = file.section();
        let a = top.below("a").unwrap().unwrap();
        let errors = [
            a.whole("b", 1..=9).unwrap_err(),
            a.whole("c", 1..=9).unwrap_err(),
            a.number("d", 0.0..=1.0).unwrap_err(),
            a.text("c").unwrap_err(),
            a.texts("b").unwrap_err(),
            a.flag("b").unwrap_err(),
            a.check_names(&["b", "c"]).unwrap_err(),
            a.missing("x", "a text"),
        ]
        .map(|error| error.to_string());
        for (error, part) in errors.iter().zip([
            "--config a.yaml: field `a.b`: expected a whole number from 1 to 9, found \"many\"",
            "field `a.c`: expected a whole number from 1 to 9, found 2.5",
            "field `a.d`: expected a number from 0 to 1, found -1",
            "field `a.c`: expected a text, found 2.5",
            "field `a.b`: expected a list of texts",
            "field `a.b`: expected true or false",
            "field `a.d`: there is no such setting\n  take it out; the settings here are b, c",
            "field `a.x`: missing; expected a text",
        ]) {
            assert!(error.contains(part), "{part} is not in {error}");
        }
        let section = top.below("e").unwrap_err().to_string();
        assert!(
            section.contains("field `e`: expected named values below it, found 3"),
            "{section}"
        );
        assert!(top.below("f").unwrap().is_none() && top.below("g").unwrap().is_none());
    }

    #[test]
    fn what_is_no_file_of_settings_is_refused_with_its_line() {
        for (text, part) in [
            ("a: [1, 2\nb: 3\n", "cannot be read as YAML"),
            ("a: 1\na: 2\n", "line 2"),
            ("{\"a\": }", "cannot be read as JSON: expected value at line 1"),
            ("- a\n- b\n", "there are no named values at its top"),
            ("", "cannot be read as YAML"),
        ] {
            let refused = parse(text).unwrap_err();
            assert!(refused.contains(part), "{text:?}: {refused}");
            assert!(refused.starts_with("--config a.yaml: "), "{refused}");
        }
        let missing = SettingsFile::read("--config", Path::new("/none/config.yaml")).unwrap_err();
        assert!(missing.to_string().contains("/none/config.yaml"), "{missing}");
    }
}
