//! The group whose members may administer a node.

use std::fs;
use std::path::Path;

/// A group of this host, as it was when the configuration was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdminGroup {
    /// Its number. It owns the socket's file.
    pub number: u32,
    /// Users that the group's database lists as members.
    pub members: Vec<u32>,
}

impl AdminGroup {
    /// Whether a process of this user and group belongs to it. The kernel tells both of the process
    /// at the other end of a socket.
    pub fn includes(&self, user: u32, group: u32) -> bool {
        group == self.number || self.members.contains(&user)
    }

    /// The group with this name or number, from files such as `/etc/group` and `/etc/passwd`.
    pub(super) fn find(name: &str, groups: &Path, passwd: &Path) -> Option<Self> {
        let text = fs::read_to_string(groups).unwrap_or_default();
        let found = text.lines().find_map(|line| {
            let fields: Vec<&str> = line.split(':').collect();
            let [group, _, number, members] = fields[..] else { return None };
            let is_it = group == name || number == name;
            let names = members.split(',').filter(|user| !user.is_empty());
            let users = names.filter_map(|user| user_number(user, passwd)).collect();
            Some(Self { number: number.parse().ok()?, members: users }).filter(|_| is_it)
        });
        // A group of a directory service has no line there: its number is enough, and then those
        // of its members count whose process has it as its group.
        found.or_else(|| Some(Self { number: name.parse().ok()?, members: Vec::new() }))
    }
}

/// The number of a user that is given by number or name.
pub(super) fn user_number(user: &str, passwd: &Path) -> Option<u32> {
    user.parse().ok().or_else(|| {
        let text = fs::read_to_string(passwd).ok()?;
        text.lines().find_map(|line| {
            let mut fields = line.split(':');
            let is_it = fields.next() == Some(user);
            fields.nth(1).filter(|_| is_it)?.parse().ok()
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_found_by_name_or_number_with_its_members() {
        let directory = tempfile::tempdir().unwrap();
        let (groups, passwd) = (directory.path().join("group"), directory.path().join("passwd"));
        fs::write(&groups, "root:x:0:\nops:x:700:alice,gone\nodd line\n").unwrap();
        fs::write(&passwd, "alice:x:1001:100::/:\nbob:x:1002:700::/:\n").unwrap();
        let expected = AdminGroup { number: 700, members: vec![1001] };
        for name in ["ops", "700"] {
            assert_eq!(AdminGroup::find(name, &groups, &passwd), Some(expected.clone()));
        }
        assert!(expected.includes(1001, 100) && expected.includes(1002, 700));
        assert!(!expected.includes(1002, 100));
        let elsewhere = AdminGroup { number: 70_000, members: vec![] };
        assert_eq!(AdminGroup::find("70000", &groups, &passwd), Some(elsewhere));
        assert_eq!(AdminGroup::find("nobody-here", &groups, &passwd), None);
    }
}
