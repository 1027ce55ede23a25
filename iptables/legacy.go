package iptables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"io/fs"
	"os"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Options of getsockopt(2) with which iptables-legacy reads from the kernel
// (linux/netfilter_ipv4/ip_tables.h, linux/netfilter_ipv6/ip6_tables.h). They work on any
// socket of the family and need CAP_NET_ADMIN only.
const (
	legacyInfo    = 64
	legacyEntries = 65
)

// legacyRevisions returns the options for the revision of a match and of a target.
func legacyRevisions(f Family) (match, target int) {
	if f == IPv6 {
		return 68, 69
	}
	return 66, 67
}

// Sizes of the kernel's structures.
const (
	tableNameSize     = 32               // XT_TABLE_MAXNAMELEN
	extensionNameSize = 29               // XT_EXTENSION_MAXNAMELEN
	infoSize          = 32 + 4*(1+5+5+2) // struct ipt_getinfo; the last two are entries and size
	entriesHeader     = 32 + 4 + 4       // struct ipt_get_entries: name, size, padding
)

// askLegacy passes buffer to the kernel, which writes its answer there.
func askLegacy(f Family, option int, buffer []byte) error {
	domain, level := unix.AF_INET, unix.SOL_IP
	if f == IPv6 {
		domain, level = unix.AF_INET6, unix.SOL_IPV6
	}
	fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer func() { _ = unix.Close(fd) }()
	size := uint32(len(buffer))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option),
		uintptr(unsafe.Pointer(&buffer[0])), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return os.NewSyscallError("getsockopt", errno)
	}
	return nil
}

// lacksLegacyTable reports whether the kernel has no such table. The question makes a table
// that was not in use, so it is asked only after a tool had to make the table.
func lacksLegacyTable(f Family, table string) bool {
	if table == "" || len(table) >= tableNameSize {
		return false
	}
	buffer := make([]byte, infoSize)
	copy(buffer, table)
	return isAny(askLegacy(f, legacyInfo, buffer), unix.ENOENT, unix.ENOPROTOOPT, unix.EAFNOSUPPORT)
}

// lacksLegacyExtension returns the first match or target in a text for iptables-restore that
// the kernel says it does not have, or "". iptables-legacy does not print the error of a
// commit.
func lacksLegacyExtension(f Family, text string) string {
	match, target := legacyRevisions(f)
	asked := map[string]bool{}
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "-A ") && !strings.HasPrefix(line, "-I ") {
			continue
		}
		previous := ""
		for _, word := range words(strings.TrimSpace(line)) {
			option := map[string]int{"-m": match, "-j": target}[previous]
			previous = word
			if option == 0 || asked[word] || builtin(word) {
				continue
			}
			asked[word] = true
			buffer := make([]byte, extensionNameSize+1)
			copy(buffer[:extensionNameSize-1], word)
			if errors.Is(askLegacy(f, option, buffer), unix.ENOENT) {
				return word
			}
		}
	}
	return ""
}

// builtin reports whether a target needs no module: it is a verdict or a chain of nametap.
func builtin(target string) bool {
	return slices.Contains([]string{"RETURN", "ACCEPT"}, target) || strings.HasPrefix(target, ownPrefix)
}

// legacyTables returns nametap's tables that legacy has. Without ip_tables in the kernel
// there are none.
func legacyTables(f Family) ([]string, error) {
	name := "/proc/thread-self/net/ip_tables_names"
	if f == IPv6 {
		name = "/proc/thread-self/net/ip6_tables_names"
	}
	text, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading which tables iptables-legacy has: %w", err)
	}
	var tables []string
	for _, table := range strings.Fields(string(text)) {
		if slices.Contains(tableNames(), table) {
			tables = append(tables, table)
		}
	}
	return tables, nil
}

// legacyPrint adds the tables of legacy that nametap uses to a hash, without the counters.
func legacyPrint(hash *maphash.Hash, f Family) error {
	tables, err := legacyTables(f)
	if errors.Is(err, os.ErrPermission) {
		return nil // iptables-legacy-save cannot read them either
	}
	if err != nil {
		return err
	}
	for _, table := range tables {
		info := make([]byte, infoSize)
		copy(info, table)
		if err := askLegacy(f, legacyInfo, info); err != nil {
			return fmt.Errorf("checking for legacy table %s of %s: %w", table, f, err)
		}
		size := binary.NativeEndian.Uint32(info[infoSize-4:])
		entries := make([]byte, entriesHeader+size)
		copy(entries, table)
		binary.NativeEndian.PutUint32(entries[tableNameSize:], size)
		if err := askLegacy(f, legacyEntries, entries); err != nil {
			return fmt.Errorf("reading legacy table %s of %s: %w", table, f, err)
		}
		_, _ = hash.Write(info)
		hashEntries(hash, f, entries[entriesHeader:])
	}
	return nil
}

// hashEntries adds the entries of a table to a hash, without their counters. An entry
// (struct ipt_entry, ip6t_entry) is the packet that it matches, then the offsets of its
// target and of the next entry, then its counters, then matches and target.
func hashEntries(hash *maphash.Hash, f Family, entries []byte) {
	const counters = 16
	packet := 84 // struct ipt_ip
	if f == IPv6 {
		packet = 136 // struct ip6t_ip6
	}
	next := packet + 4 + 2 // after nfcache and target_offset
	begin := (next + 2 + 4 + 7) &^ 7
	for len(entries) >= begin+counters {
		size := int(binary.NativeEndian.Uint16(entries[next:]))
		if size < begin+counters || size > len(entries) {
			break
		}
		_, _ = hash.Write(entries[:begin])
		_, _ = hash.Write(entries[begin+counters : size])
		entries = entries[size:]
	}
	_, _ = hash.Write(entries)
}

// knownEmpty reports whether the kernel reports that a backend has nothing of nametap in a
// family that its tools cannot read.
func knownEmpty(b Backend, f Family, unread error) bool {
	if isAny(unread, errNoFamily) {
		return true
	}
	if b == Legacy {
		tables, err := legacyTables(f)
		return err == nil && len(tables) == 0
	}
	for _, table := range tableNames() {
		if !isAny(askNFTTable(f, table), unix.ENOENT, unix.EOPNOTSUPP, unix.EAFNOSUPPORT, unix.EPROTONOSUPPORT) {
			return false
		}
	}
	return true
}
