//! Checks that no type does too many things: its methods and the files with them have limits.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use quote::ToTokens;
use syn::{Attribute, ImplItem, Item, Type};

use crate::sources::SourceFile;

const METHODS_MAX: usize = 50;
const FILES_MAX: usize = 5;

/// Types that may have more, with their own limits.
const LARGE: &[Large] = &[
    Large {
        crate_name: "disk",
        type_name: "SegmentFiles",
        methods: 85,
        files: 10,
        reason: "one tier over segments under one lock, not divided yet; 18 are those of `Tier`",
    },
    Large {
        crate_name: "runtime",
        type_name: "World",
        methods: 65,
        files: 9,
        reason: "one simulated machine: each file has the calls of one primitive, such as a lock",
    },
    Large {
        crate_name: "sim",
        type_name: "Device",
        methods: 55,
        files: 3,
        reason: "one simulated disk, which implements every file operation with its faults",
    },
    Large {
        crate_name: "store",
        type_name: "Store",
        methods: 60,
        files: 12,
        reason: "the public handle: each call is a short method beside the type that makes it",
    },
    Large {
        crate_name: "store",
        type_name: "StoreState",
        methods: 65,
        files: 7,
        reason: "what one lock keeps in agreement; its files are the parts of one folder",
    },
];

struct Large {
    crate_name: &'static str,
    type_name: &'static str,
    methods: usize,
    files: usize,
    reason: &'static str,
}

/// The files with methods of a type, and how many methods these are.
#[derive(Debug, Default)]
struct Methods {
    count: usize,
    files: BTreeSet<PathBuf>,
}

/// By crate and name. Types of one crate with the same name count as one.
type Types = BTreeMap<(String, String), Methods>;

/// Each type with too many methods or files, and each exception that is not needed.
pub(crate) fn violations(files: &[SourceFile]) -> Vec<String> {
    let mut types = Types::new();
    for file in files {
        add_items(&mut types, &file.crate_name, &file.below, &file.items);
    }
    let mut violations: Vec<String> = types.iter().filter_map(violation).collect();
    violations.extend(LARGE.iter().filter_map(|large| useless_exception(&types, large)));
    violations
}

#[test]
fn methods_are_counted_over_all_files() {
    let mut types = Types::new();
    let one = "struct A; impl A { fn a(&self) {} fn b() {} const C: u8 = 1; } impl Copy for A {}";
    let two = "impl<T> super::A<T> where T: Copy { fn c() {} } \
        mod inner { impl A { fn d() {} } } #[cfg(test)] mod tests { impl A { fn e() {} } } \
        #[cfg(test)] impl A { fn f() {} }";
    let mut add = |file: &str, text: &str| {
        add_items(&mut types, "x", Path::new(file), &syn::parse_file(text).unwrap().items);
    };
    add("one.rs", one);
    add("two.rs", two);
    let methods: Vec<String> = (0..=METHODS_MAX).map(|at| format!("fn f{at}() {{}}")).collect();
    add("one.rs", &format!("impl B {{ {} }}", methods.concat()));
    for at in 0..=FILES_MAX {
        add(&format!("{at}.rs"), "impl C { fn f() {} }");
    }
    let found = &types[&("x".to_owned(), "A".to_owned())];
    assert_eq!((found.count, found.files.len()), (4, 2));
    let violations: Vec<String> = types.iter().filter_map(violation).collect();
    assert_eq!(violations.len(), 2, "{violations:?}");
    let large = Large { crate_name: "x", type_name: "A", methods: 60, files: 2, reason: "why" };
    assert!(useless_exception(&types, &large).is_some());
    let large = Large { type_name: "B", ..large };
    assert!(useless_exception(&types, &large).is_none());
}

fn violation((name, methods): (&(String, String), &Methods)) -> Option<String> {
    let is_large = |large: &&Large| (large.crate_name, large.type_name) == (&name.0, &name.1);
    let large = LARGE.iter().find(is_large);
    let limits = large.map_or((METHODS_MAX, FILES_MAX), |large| (large.methods, large.files));
    let (count, files) = (methods.count, methods.files.len());
    let has_too_many = count > limits.0 || files > limits.1;
    has_too_many.then(|| {
        let (crate_name, type_name) = name;
        let (methods_max, files_max) = limits;
        format!(
            "crates/{crate_name}: {type_name} has {count} methods in {files} files; \
             the limits are {methods_max} and {files_max}"
        )
    })
}

/// An exception for a type that is gone, or that keeps the limits of all types.
fn useless_exception(types: &Types, large: &Large) -> Option<String> {
    let name = (large.crate_name.to_owned(), large.type_name.to_owned());
    let is_needed = |it: &Methods| it.count > METHODS_MAX || it.files.len() > FILES_MAX;
    let is_useless = !types.get(&name).is_some_and(is_needed) || large.reason.is_empty();
    is_useless.then(|| format!("crates/{}: {} needs no exception", name.0, name.1))
}

fn add_items(types: &mut Types, crate_name: &str, file: &Path, items: &[Item]) {
    for item in items {
        match item {
            Item::Mod(module) if !is_test(&module.attrs) => {
                let items = module.content.as_ref().map_or(&[][..], |(_, items)| items);
                add_items(types, crate_name, file, items);
            }
            Item::Impl(block) if !is_test(&block.attrs) && block.trait_.is_none() => {
                let is_method = |item: &&ImplItem| matches!(item, ImplItem::Fn(_));
                let count = block.items.iter().filter(is_method).count();
                let Type::Path(path) = &*block.self_ty else { continue };
                let name = path.path.segments.last().unwrap().ident.to_string();
                let methods = types.entry((crate_name.to_owned(), name)).or_default();
                if count > 0 {
                    methods.count += count;
                    methods.files.insert(file.to_owned());
                }
            }
            _ => {}
        }
    }
}

/// Whether an item exists in tests only.
fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let text = attribute.meta.to_token_stream().to_string();
        text == "cfg (test)" || text.starts_with("cfg (all (test")
    })
}
