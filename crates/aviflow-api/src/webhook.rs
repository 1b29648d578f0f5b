//! Addresses that notifications are posted to: whose they are, how they are shown, and where none may lead. Pure.
//!
//! People choose these addresses and the control plane posts to them, from where it stands. So none may lead to what
//! only it can reach: its own machine, and the link-local addresses where clouds hand out credentials. Whoever
//! connects asks [`refused`] of the address that a name has turned out to be, and not of the name.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Hosts that take a text and nothing else.
const CHATS: [&str; 3] = ["hooks.slack.com", "hooks.slack-gov.com", "chat.googleapis.com"];

/// The part of an address before the host, and the rest.
fn split(address: &str) -> (&str, &str) {
    address.find("://").map_or(("", address), |at| address.split_at(at + 3))
}

/// Host and port, of what comes after the scheme; a user and password before them are left out.
fn authority(rest: &str) -> &str {
    let whole = &rest[..rest.find(['/', '?', '#', '\\']).unwrap_or(rest.len())];
    whole.rsplit_once('@').map_or(whole, |(_, host)| host)
}

/// The host of an address, without a port; an IPv6 address is without its brackets.
#[must_use]
pub fn host(address: &str) -> &str {
    let authority = authority(split(address).1);
    match authority.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or(rest),
        None => authority.split(':').next().unwrap_or(authority),
    }
}

/// Whether a host takes a text and nothing else.
#[must_use]
pub fn is_chat(host: &str) -> bool {
    CHATS.iter().any(|chat| host.eq_ignore_ascii_case(chat))
}

/// An address as it may be shown: who has the rest of it may write there.
#[must_use]
pub fn masked(address: &str) -> String {
    let (scheme, rest) = split(address);
    let host = authority(rest);
    match rest == host || rest.strip_suffix('/') == Some(host) {
        true => address.to_owned(),
        false => format!("{scheme}{host}/***"),
    }
}

/// Why nothing is posted to an address, if so. `loopback` says whether the machine itself may be meant, as where it
/// is the pool.
#[must_use]
pub fn refused(ip: IpAddr, loopback: bool) -> Option<&'static str> {
    let ip = match ip {
        IpAddr::V6(six) => embedded(six).map_or(ip, IpAddr::V4),
        IpAddr::V4(_) => ip,
    };
    let link_local = match ip {
        IpAddr::V4(four) => four.is_link_local(),
        // The second is where a cloud hands out credentials over IPv6.
        IpAddr::V6(six) => six.is_unicast_link_local() || six == METADATA,
    };
    if link_local {
        return Some("it is link-local, where clouds hand out credentials");
    }
    if ip.is_unspecified() || ip.is_multicast() || ip == IpAddr::V4(Ipv4Addr::BROADCAST) {
        return Some("it is no address of a host");
    }
    (ip.is_loopback() && !loopback).then_some("it is the control plane's own machine")
}

const METADATA: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);

/// The IPv4 address that an IPv6 address stands for: mapped, or behind a translator.
fn embedded(six: Ipv6Addr) -> Option<Ipv4Addr> {
    let [a, b, c, d, e, f, g, h] = six.segments();
    let low = || {
        let ([first, second], [third, fourth]) = (g.to_be_bytes(), h.to_be_bytes());
        Ipv4Addr::new(first, second, third, fourth)
    };
    let translated = [a, b, c, d, e, f] == [0x64, 0xff9b, 0, 0, 0, 0];
    six.to_ipv4_mapped().or_else(|| translated.then(low))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_shown_with_its_host_alone() {
        let cases = [
            ("https://hooks.slack.com/services/T0/B0/key", "hooks.slack.com", "https://hooks.slack.com/***"),
            ("http://me:word@chat.example:8080/h?key=1", "chat.example", "http://chat.example:8080/***"),
            ("https://[fd00::1]:8443/x", "fd00::1", "https://[fd00::1]:8443/***"),
            ("https://chat.example?key=1", "chat.example", "https://chat.example/***"),
            ("https://chat.example/", "chat.example", "https://chat.example/"),
            ("https://chat.example", "chat.example", "https://chat.example"),
        ];
        for (address, expected, shown) in cases {
            assert_eq!((host(address), masked(address).as_str()), (expected, shown), "{address}");
            assert_eq!(masked(&masked(address)), masked(address));
        }
        assert!(is_chat("Hooks.Slack.com") && !is_chat("hooks.slack.com.example"));
    }

    #[test]
    fn nothing_leads_to_what_only_the_control_plane_reaches() {
        let check = |ip: &str, loopback: bool, allowed: bool| {
            assert_eq!(refused(ip.parse().expect(ip), loopback).is_none(), allowed, "{ip}");
        };
        for ip in ["169.254.169.254", "fe80::1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "fd00:ec2::254"] {
            check(ip, true, false);
            check(ip, false, false);
        }
        for ip in ["0.0.0.0", "::", "255.255.255.255", "224.0.0.1", "ff02::1", "::ffff:0.0.0.0"] {
            check(ip, true, false);
        }
        for ip in ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1"] {
            check(ip, true, true);
            check(ip, false, false);
        }
        for ip in ["10.1.2.3", "192.168.0.1", "93.184.216.34", "2606:2800::1", "fd12::1"] {
            check(ip, false, true);
        }
    }
}
