//! Conversion of Python arguments. An error names the argument, the given value and a valid one.

use std::fmt::Display;
use std::path::PathBuf;
use std::time::Duration;

use cascade_block::{ByteSize, TimeSpan};
use pyo3::exceptions::{PyIndexError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{
    PyBool, PyByteArray, PyBytes, PyDelta, PyFloat, PyInt, PyMapping, PySlice, PyString,
};

use crate::errors::ConfigError;

/// Limit of the characters or bytes of a value that a message shows.
const SHOWN_MAX: usize = 60;

const DURATION: &str = "a duration: a number of seconds from 0 up, text such as \"5s\" or \
                        \"250ms\", or a timedelta";
const SIZE: &str = "a size: a number of bytes from 0 up, or text such as \"512MiB\"";
const COUNT: &str = "a whole number from 0 up";

/// A `TypeError` for an argument, with a description of a valid value.
pub(crate) fn type_error(
    name: impl Display,
    given: &Bound<'_, PyAny>,
    what: impl Display,
) -> PyErr {
    PyTypeError::new_err(format!("{name}: {} is not {what}", shown(given)))
}

/// A `ValueError` for an argument, with a description of a valid value.
pub(crate) fn value_error(
    name: impl Display,
    given: &Bound<'_, PyAny>,
    what: impl Display,
) -> PyErr {
    PyValueError::new_err(format!("{name}: {} is not {what}", shown(given)))
}

/// A value as messages show it: short. Calls `repr` only of built-in types, because code of other
/// classes may fail or have effects.
pub(crate) fn shown(given: &Bound<'_, PyAny>) -> String {
    let cut = |text: String| match text.char_indices().nth(SHOWN_MAX) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    };
    if let Ok(text) = given.cast_exact::<PyString>() {
        return format!("{:?}", cut(text.to_string_lossy().into_owned()));
    }
    let is_plain = given.is_none()
        || given.is_exact_instance_of::<PyBool>()
        || given.is_exact_instance_of::<PyInt>()
        || given.is_exact_instance_of::<PyFloat>()
        || given.cast_exact::<PyBytes>().is_ok_and(|bytes| bytes.as_bytes().len() < SHOWN_MAX);
    // Python refuses to print an int of thousands of digits.
    let text = is_plain.then(|| given.repr().ok()).flatten().map(|text| cut(text.to_string()));
    text.unwrap_or_else(|| match given.get_type().name() {
        Ok(kind) => format!("<{kind}>"),
        Err(_) => "<object>".to_owned(),
    })
}

/// An integer from an `int` or another integer type, such as NumPy's. None for `bool` and `float`.
fn integer<'py, T: FromPyObject<'py, 'py>>(given: &'py Bound<'py, PyAny>) -> Option<T> {
    if given.is_instance_of::<PyBool>() || given.is_instance_of::<PyFloat>() {
        return None;
    }
    given.extract().ok()
}

fn is_number(given: &Bound<'_, PyAny>) -> bool {
    given.is_instance_of::<PyInt>() || given.is_instance_of::<PyFloat>()
}

/// A duration.
pub(crate) fn duration(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Duration> {
    let refused = |reason: String| ConfigError::new_err(format!("{name}: {reason}"));
    if let Ok(text) = given.cast::<PyString>() {
        let span = text.to_string_lossy().parse::<TimeSpan>();
        return span.map(|span| span.0).map_err(|error| refused(error.to_string()));
    }
    if given.is_instance_of::<PyBool>() {
        return Err(type_error(name, given, DURATION));
    }
    if given.is_instance_of::<PyDelta>() {
        let seconds: f64 = given.call_method0("total_seconds")?.extract()?;
        return in_seconds(seconds).map_err(refused);
    }
    match given.extract::<f64>() {
        Ok(seconds) => in_seconds(seconds).map_err(refused),
        // An int outside the range of float is a number with a wrong value, not of a wrong type.
        Err(_) if is_number(given) => Err(refused(format!("{} is not {DURATION}", shown(given)))),
        Err(_) => Err(type_error(name, given, DURATION)),
    }
}

fn in_seconds(seconds: f64) -> Result<Duration, String> {
    let out_of_range = |_| format!("{seconds} is not {DURATION} of at most 36525 days");
    TimeSpan::from_seconds(seconds).map(|span| span.0).map_err(out_of_range)
}

/// A duration, or `None`.
pub(crate) fn optional_duration(
    name: &str,
    given: &Bound<'_, PyAny>,
) -> PyResult<Option<Duration>> {
    if given.is_none() { Ok(None) } else { duration(name, given).map(Some) }
}

/// A duration in milliseconds, or `None`.
fn optional_ms(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
    let time = optional_duration(name, given)?;
    Ok(time.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX)))
}

/// A size in bytes.
pub(crate) fn size(name: &str, given: &Bound<'_, PyAny>) -> PyResult<u64> {
    if let Ok(text) = given.cast::<PyString>() {
        let size = text.to_string_lossy().parse::<ByteSize>();
        let refused = |error| ConfigError::new_err(format!("{name}: {error}"));
        return size.map(|size| size.0).map_err(refused);
    }
    match integer(given) {
        Some(bytes) => Ok(bytes),
        None if is_number(given) && !given.is_instance_of::<PyBool>() => {
            Err(ConfigError::new_err(format!("{name}: {} is not {SIZE}", shown(given))))
        }
        None => Err(type_error(name, given, SIZE)),
    }
}

/// A size of memory in bytes.
fn memory_size(name: &str, given: &Bound<'_, PyAny>) -> PyResult<usize> {
    usize::try_from(size(name, given)?).map_err(|_| value_error(name, given, SIZE))
}

/// A rate in bytes per second: a size, or text such as `"500MiB/s"`.
pub(crate) fn rate(name: &str, given: &Bound<'_, PyAny>) -> PyResult<u64> {
    if let Ok(text) = given.cast::<PyString>() {
        let text = text.to_string_lossy();
        let bytes = text.trim().strip_suffix("/s").unwrap_or(&text).parse::<ByteSize>();
        let refused = |_| {
            let what = "a rate: bytes per second, or text such as \"500MiB/s\"";
            ConfigError::new_err(format!("{name}: {} is not {what}", shown(given)))
        };
        return bytes.map(|size| size.0).map_err(refused);
    }
    size(name, given)
}

/// A share in percent: a number from 0 to 100, or text such as `"90%"`.
pub(crate) fn percent(name: &str, given: &Bound<'_, PyAny>) -> PyResult<u8> {
    let percent = match given.cast::<PyString>() {
        Ok(text) => text.to_string_lossy().trim().trim_end_matches('%').trim_end().parse().ok(),
        Err(_) => integer(given),
    };
    let what = "a share: a whole number of percent from 0 to 100, or text such as \"90%\"";
    percent.filter(|percent| *percent <= 100).ok_or_else(|| value_error(name, given, what))
}

/// A count.
pub(crate) fn count(name: &str, given: &Bound<'_, PyAny>) -> PyResult<usize> {
    integer(given).ok_or_else(|| {
        if is_number(given) && !given.is_instance_of::<PyBool>() {
            value_error(name, given, COUNT)
        } else {
            type_error(name, given, COUNT)
        }
    })
}

fn optional_count(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
    if given.is_none() { Ok(None) } else { count(name, given).map(Some) }
}

/// A `bool`.
pub(crate) fn flag(name: &str, given: &Bound<'_, PyAny>) -> PyResult<bool> {
    given.extract().map_err(|_| type_error(name, given, "True or False"))
}

/// A `str`.
pub(crate) fn text(name: &str, given: &Bound<'_, PyAny>) -> PyResult<String> {
    let text = given.cast::<PyString>().map_err(|_| type_error(name, given, "text"))?;
    match text.to_str() {
        Ok(text) => Ok(text.to_owned()),
        Err(_) => Err(value_error(name, given, "text that can be encoded as UTF-8")),
    }
}

fn optional_text(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Option<String>> {
    if given.is_none() { Ok(None) } else { text(name, given).map(Some) }
}

/// A path: text, bytes or a path object.
pub(crate) fn path(name: &str, given: &Bound<'_, PyAny>) -> PyResult<PathBuf> {
    let what = "a path: text or an os.PathLike";
    let decoded = given.py().import("os")?.call_method1("fsdecode", (given,));
    let decoded = decoded.map_err(|_| type_error(name, given, what))?;
    let path: PathBuf = decoded.extract().map_err(|_| type_error(name, given, what))?;
    let bytes = path.as_os_str().as_encoded_bytes();
    if bytes.is_empty() || bytes.contains(&0) {
        return Err(value_error(name, given, "a path: it must not be empty or contain NUL"));
    }
    Ok(path)
}

/// The token of a tenant, or `None`.
pub(crate) fn token(given: &Bound<'_, PyAny>) -> PyResult<Option<Vec<u8>>> {
    let token = if given.is_none() {
        return Ok(None);
    } else if given.is_instance_of::<PyString>() {
        text("token", given)?.into_bytes()
    } else if let Ok(bytes) = given.cast::<PyBytes>() {
        bytes.as_bytes().to_vec()
    } else if let Ok(bytes) = given.cast::<PyByteArray>() {
        bytes.to_vec()
    } else {
        return Err(type_error("token", given, "text or bytes"));
    };
    // A message must never show a token.
    if token.is_empty() {
        let message =
            "token: it is empty; give the tenant's token, or None for the tenant of this user";
        return Err(ConfigError::new_err(message));
    }
    Ok(Some(token))
}

/// The cursor of a change follower, or `None`.
pub(crate) fn since(given: &Bound<'_, PyAny>) -> PyResult<Option<Vec<u8>>> {
    if given.is_none() {
        return Ok(None);
    }
    let bytes = given.cast::<PyBytes>();
    let bytes = bytes.map_err(|_| type_error("since", given, "the bytes of Changes.next"))?;
    Ok(Some(bytes.as_bytes().to_vec()))
}

/// The position of a Python index; a negative one counts from the end.
pub(crate) fn position(given: &Bound<'_, PyAny>, count: usize) -> PyResult<usize> {
    let out_of_range =
        || PyIndexError::new_err(format!("index: {} of {count} blocks", shown(given)));
    let Some(index) = integer::<isize>(given) else {
        let is_number = given.is_instance_of::<PyInt>() && !given.is_instance_of::<PyBool>();
        let what = "a whole number or a slice";
        return Err(if is_number { out_of_range() } else { type_error("index", given, what) });
    };
    let at = if index < 0 {
        count.checked_sub(index.unsigned_abs())
    } else {
        Some(index.unsigned_abs())
    };
    at.filter(|at| *at < count).ok_or_else(out_of_range)
}

/// The positions that a Python slice selects.
pub(crate) fn selected_by(
    slice: &Bound<'_, PySlice>,
    count: usize,
) -> PyResult<impl Iterator<Item = usize> + use<>> {
    let count = isize::try_from(count).expect("a sequence in memory fits isize");
    let selected = slice.indices(count)?;
    let at = move |nth: usize| selected.start + nth.cast_signed() * selected.step;
    Ok((0..selected.slicelength).map(move |nth| at(nth).cast_unsigned()))
}

/// The names and values of a mapping, as text.
pub(crate) fn fields(given: &Bound<'_, PyAny>) -> PyResult<Vec<(String, String)>> {
    let what = "a mapping of names to text, such as {\"dtype\": \"bf16\"}";
    let mapping = given.cast::<PyMapping>().map_err(|_| type_error("fields", given, what))?;
    let mut fields = Vec::new();
    for item in mapping.items()?.iter() {
        let (name, value): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item.extract()?;
        let name = text("fields: a name", &name)?;
        let Ok(text) = value.cast::<PyString>() else {
            let advice = if is_number(&value) {
                format!("text; write \"{}\"", value.str()?)
            } else {
                "text".to_owned()
            };
            return Err(type_error(format!("fields[{name:?}]"), &value, advice));
        };
        let text = text.to_str().map(str::to_owned);
        let encodable = "text that can be encoded as UTF-8";
        fields.push((
            name.clone(),
            text.map_err(|_| value_error(format!("fields[{name:?}]"), &value, encodable))?,
        ));
    }
    Ok(fields)
}

/// Functions for `from_py_with`, each for the argument with its name.
macro_rules! converters {
    ($($name:ident: $convert:ident -> $kind:ty;)*) => {
        /// Converters of the arguments with these names.
        pub(crate) mod of {
            use super::*;
            $(pub(crate) fn $name(given: &Bound<'_, PyAny>) -> PyResult<$kind> {
                super::$convert(stringify!($name), given)
            })*
        }
    };
}

converters! {
    at: optional_duration -> Option<Duration>;
    block_tokens: count -> usize;
    chain: flag -> bool;
    count: optional_count -> Option<usize>;
    device: count -> usize;
    first: count -> usize;
    is_prefix: flag -> bool;
    keep_partial: flag -> bool;
    last_is_partial: flag -> bool;
    limit: count -> usize;
    name: optional_text -> Option<String>;
    pages: count -> usize;
    partial_tail: flag -> bool;
    size: memory_size -> usize;
    stream: count -> usize;
    text: text -> String;
    timeout: optional_duration -> Option<Duration>;
    traceparent: optional_text -> Option<String>;
    ttl: optional_ms -> Option<u64>;
    ways: text -> String;
}
