//! The group whose members may administer a node.

use std::fs;
use std::path::Path;

/// A group of this host, read together with the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdminGroup {
    /// The GID. This group owns the socket file.
    pub gid: u32,
    /// UIDs of the members that the group database lists. It does not list users whose primary
    /// group this is.
    pub members: Vec<u32>,
}

impl AdminGroup {
    /// Whether the group includes a process with this UID and GID, which the kernel reports for
    /// the peer of a Unix socket. The GID of a process is normally its user's primary group.
    pub fn includes(&self, user: u32, group: u32) -> bool {
        group == self.gid || self.members.contains(&user)
    }

    /// Finds a group by name or GID in files such as `/etc/group` and `/etc/passwd`.
    pub(super) fn find(name: &str, groups: &Path, passwd: &Path) -> Option<Self> {
        let text = fs::read_to_string(groups).unwrap_or_default();
        let found = text.lines().find_map(|line| {
            let fields: Vec<&str> = line.split(':').collect();
            let [group, _, number, members] = fields[..] else { return None };
            let is_match = group == name || number == name;
            let names = members.split(',').filter(|user| !user.is_empty());
            let users = names.filter_map(|user| user_id(user, passwd)).collect();
            Some(Self { gid: number.parse().ok()?, members: users }).filter(|_| is_match)
        });
        // A group of a directory service is not in the file. Its GID is accepted as it is; only
        // processes that run with this GID are then members.
        found.or_else(|| Some(Self { gid: name.parse().ok()?, members: Vec::new() }))
    }
}

/// The UID of a user that is given by UID or name.
pub(super) fn user_id(user: &str, passwd: &Path) -> Option<u32> {
    user.parse().ok().or_else(|| {
        let text = fs::read_to_string(passwd).ok()?;
        text.lines().find_map(|line| {
            let mut fields = line.split(':');
            let is_match = fields.next() == Some(user);
            fields.nth(1).filter(|_| is_match)?.parse().ok()
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_found_by_name_or_gid_with_its_members() {
        let directory = tempfile::tempdir().unwrap();
        let (groups, passwd) = (directory.path().join("group"), directory.path().join("passwd"));
        fs::write(&groups, "root:x:0:\nops:x:700:alice,deleted\nmalformed line\n").unwrap();
        fs::write(&passwd, "alice:x:1001:100::/:\nbob:x:1002:700::/:\n").unwrap();
        let expected = AdminGroup { gid: 700, members: vec![1001] };
        for name in ["ops", "700"] {
            assert_eq!(AdminGroup::find(name, &groups, &passwd), Some(expected.clone()));
        }
        assert!(expected.includes(1001, 100) && expected.includes(1002, 700));
        assert!(!expected.includes(1002, 100));
        let unlisted = AdminGroup { gid: 70_000, members: vec![] };
        assert_eq!(AdminGroup::find("70000", &groups, &passwd), Some(unlisted));
        assert_eq!(AdminGroup::find("unknown", &groups, &passwd), None);
    }
}
