//! Checks that the files of a crate do not depend on each other in circles. A file and those in its
//! own folder may: they are one module and its parts.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens;
use syn::{Attribute, Item, UseTree, Visibility};

use crate::sources::SourceFile;

/// A module's path below its crate; empty for the crate's root.
type Module = Vec<String>;

/// The modules of a crate, and the paths that each names.
type Crate = BTreeMap<Module, Source>;

#[derive(Default)]
struct Source {
    /// All paths that the file names, such as `crate::pool::Pool` or `super::Pool`.
    paths: BTreeSet<Vec<String>>,
    /// Names that it exports from elsewhere, with the paths that they stand for.
    exports: BTreeMap<String, Vec<String>>,
}

/// Each circle of files, with the crate that it is in.
pub(crate) fn violations(files: &[SourceFile]) -> Vec<String> {
    let mut crates: BTreeMap<&str, Crate> = BTreeMap::new();
    for file in files {
        let modules = crates.entry(&file.crate_name).or_default();
        modules.insert(module_of(&file.below), source(&file.items));
    }
    let circles = |(name, modules)| {
        circles_in(modules).into_iter().map(move |circle| format!("crates/{name}: {circle}"))
    };
    crates.iter().flat_map(circles).collect()
}

#[test]
fn circles_are_found_through_imports_exports_and_macros() {
    let sources = [
        ("", "pub use pool::Pool; mod pool; mod region; mod slab; mod pool_test;"),
        ("pool", "use crate::region::Region; mod parts;"),
        ("pool::parts", "use super::Pool; fn f() { println!(\"{}\", crate::slab::LEN); }"),
        ("region", "fn f(pool: &crate::Pool) {} #[cfg(test)] mod tests { use crate::slab::A; }"),
        ("slab", "use crate::{Pool, slab::*};"),
    ];
    let found = circles_in(&parsed(&sources));
    // Slab uses the pool, and only a part of the pool uses slab: no file is in a circle with it.
    assert_eq!(found, ["pool -> region, region -> pool"]);

    let mended = sources.map(|(name, text)| (name, text.replace("&crate::Pool", "&Region")));
    let mended = mended.each_ref().map(|(name, text)| (*name, &**text));
    assert!(circles_in(&parsed(&mended)).is_empty());
}

fn parsed(sources: &[(&str, &str)]) -> Crate {
    let module = |name: &str| -> Module {
        name.split("::").filter(|it| !it.is_empty()).map(str::to_owned).collect()
    };
    let read = |text: &str| source(&syn::parse_file(text).expect("it compiles").items);
    sources.iter().map(|(name, text)| (module(name), read(text))).collect()
}

fn module_of(below: &Path) -> Module {
    let below = below.with_extension("");
    let mut module: Module = below.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    if module.last().is_some_and(|last| ["mod", "lib", "main"].contains(&&**last)) {
        module.pop();
    }
    module
}

fn source(items: &[Item]) -> Source {
    let mut source = Source::default();
    for item in items {
        add_item(&mut source, item);
    }
    source
}

fn add_item(source: &mut Source, item: &Item) {
    match item {
        Item::Use(import) if !is_test(&import.attrs) => {
            let is_export = !matches!(import.vis, Visibility::Inherited);
            add_import(source, &import.tree, &mut Vec::new(), is_export);
        }
        Item::Mod(module) if is_test(&module.attrs) => {}
        Item::Mod(module) => {
            for item in module.content.iter().flat_map(|(_, items)| items) {
                add_item(source, item);
            }
        }
        Item::Fn(function) if is_test(&function.attrs) => {}
        Item::Impl(block) if is_test(&block.attrs) => {}
        item => add_tokens(source, item.to_token_stream()),
    }
}

/// Whether an item exists in tests only.
fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let text = attribute.meta.to_token_stream().to_string();
        text == "cfg (test)" || text.starts_with("cfg (all (test")
    })
}

fn add_import(source: &mut Source, tree: &UseTree, path: &mut Vec<String>, is_export: bool) {
    let mut end = |name: &str, last: &str| {
        let mut full = path.clone();
        if last != "self" {
            full.push(last.to_owned());
        }
        if is_export {
            source.exports.insert(name.to_owned(), full.clone());
        }
        source.paths.insert(full);
    };
    match tree {
        UseTree::Name(name) => end(&name.ident.to_string(), &name.ident.to_string()),
        UseTree::Rename(name) => end(&name.rename.to_string(), &name.ident.to_string()),
        UseTree::Glob(_) => end("*", "self"),
        UseTree::Path(part) => {
            path.push(part.ident.to_string());
            add_import(source, &part.tree, path, is_export);
            path.pop();
        }
        UseTree::Group(group) => {
            for tree in &group.items {
                add_import(source, tree, path, is_export);
            }
        }
    }
}

/// Adds the paths in an item that start at the crate or at a parent, also those in macros.
fn add_tokens(source: &mut Source, tokens: TokenStream) {
    let mut path: Vec<String> = Vec::new();
    let mut colons = 0;
    for token in tokens {
        match token {
            TokenTree::Punct(punct) if punct.as_char() == ':' => {
                colons += 1;
                continue;
            }
            TokenTree::Ident(name) if !path.is_empty() && colons == 2 => {
                path.push(name.to_string());
            }
            token => {
                source.paths.extend((path.len() > 1).then(|| std::mem::take(&mut path)));
                path.clear();
                match token {
                    TokenTree::Ident(name) if name == "crate" || name == "super" => {
                        path.push(name.to_string());
                    }
                    TokenTree::Group(group) => add_tokens(source, group.stream()),
                    _ => {}
                }
            }
        }
        colons = 0;
    }
    source.paths.extend((path.len() > 1).then_some(path));
}

/// The module that a path leads to from a module. None if the path is of another crate.
fn target(modules: &Crate, from: &[String], path: &[String]) -> Option<Module> {
    let mut at = from.to_vec();
    let mut names = path;
    match path.first().map(String::as_str) {
        Some("crate") => (at, names) = (Vec::new(), &path[1..]),
        Some("self") => names = &path[1..],
        Some("super") => {
            while let Some((first, rest)) = names.split_first()
                && first == "super"
            {
                at.pop();
                names = rest;
            }
        }
        Some(name) => {
            let child = [from, &[name.to_owned()]].concat();
            modules.contains_key(&child).then_some(())?;
        }
        None => return None,
    }
    for (index, name) in names.iter().enumerate() {
        let below = [&*at, std::slice::from_ref(name)].concat();
        if modules.contains_key(&below) {
            at = below;
        } else if let Some(export) = modules.get(&at).and_then(|source| source.exports.get(name))
            && at != from
        {
            let full = [&**export, &names[index + 1..]].concat();
            return target(modules, &at, &full).or(Some(at));
        } else {
            break;
        }
    }
    // A name of an inline module, or of a file that does not exist, is its parent's.
    while !modules.contains_key(&at) {
        at.pop()?;
    }
    Some(at)
}

/// The circles of a crate, each as the list of its edges.
fn circles_in(modules: &Crate) -> Vec<String> {
    let mut edges: BTreeMap<&Module, BTreeSet<Module>> = BTreeMap::new();
    for (module, source) in modules {
        let targets = source.paths.iter().filter_map(|path| target(modules, module, path));
        // A module and its parts.
        let is_apart = |to: &Module| !to.starts_with(module) && !module.starts_with(to);
        edges.insert(module, targets.filter(is_apart).collect());
    }
    let reached: BTreeMap<&Module, BTreeSet<&Module>> =
        edges.keys().map(|from| (*from, reached_from(from, &edges))).collect();
    let mut seen = BTreeSet::new();
    let mut circles = Vec::new();
    for (module, targets) in &reached {
        if !targets.contains(module) || seen.contains(module) {
            continue;
        }
        let members: BTreeSet<&Module> =
            targets.iter().filter(|other| reached[**other].contains(module)).copied().collect();
        let inside = members.iter().flat_map(|from| edges[from].iter().map(move |to| (from, to)));
        let inside = inside.filter(|(_, to)| members.contains(to));
        let names: Vec<String> =
            inside.map(|(from, to)| format!("{} -> {}", from.join("::"), to.join("::"))).collect();
        seen.extend(members);
        circles.push(names.join(", "));
    }
    circles
}

/// The modules that can be reached from one, over at least one edge.
fn reached_from<'a>(
    from: &Module,
    edges: &'a BTreeMap<&Module, BTreeSet<Module>>,
) -> BTreeSet<&'a Module> {
    let mut reached = BTreeSet::new();
    let mut next: Vec<&Module> = edges[from].iter().collect();
    while let Some(module) = next.pop() {
        if reached.insert(module) {
            next.extend(&edges[module]);
        }
    }
    reached
}
