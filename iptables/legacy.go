package iptables

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/family"
)

// The option of getsockopt(2) with which iptables-legacy reads from the kernel (linux/netfilter_ipv4/ip_tables.h,
// linux/netfilter_ipv6/ip6_tables.h). It works on any socket of the family and needs only CAP_NET_ADMIN.
const legacyInfo = 64

// legacyRevisions returns the options that ask for the revision of a match and of a target.
func legacyRevisions(f family.Family) (match, target int) {
	if f == family.IPv6 {
		return 68, 69
	}
	return 66, 67
}

// Sizes of the kernel's structures.
const (
	tableNameSize     = 32               // XT_TABLE_MAXNAMELEN
	extensionNameSize = 29               // XT_EXTENSION_MAXNAMELEN
	infoSize          = 32 + 4*(1+5+5+2) // struct ipt_getinfo
)

// askLegacy passes buffer to the kernel, which writes its answer there.
func askLegacy(f family.Family, option int, buffer []byte) error {
	domain, level := unix.AF_INET, unix.SOL_IP
	if f == family.IPv6 {
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

// lacksLegacyTable reports whether the kernel cannot have the table. The request makes the kernel create the
// table. So lacksLegacyTable is called only after a tool has made the kernel try the same.
func lacksLegacyTable(f family.Family, table string) bool {
	if table == "" || len(table) >= tableNameSize {
		return false
	}
	buffer := make([]byte, infoSize)
	copy(buffer, table)
	return isAny(askLegacy(f, legacyInfo, buffer), unix.ENOENT, unix.ENOPROTOOPT, unix.EAFNOSUPPORT)
}

// missingLegacyExtension returns the first match or target that the kernel lacks, or "" if it has all. It looks at
// all matches and targets in text, an input of iptables-restore. It asks the kernel, because iptables-legacy does
// not say what is missing when a commit fails.
func missingLegacyExtension(f family.Family, text string) string {
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

// builtin reports whether a target needs no kernel module, because it is a verdict or a chain of nametap.
func builtin(target string) bool {
	return slices.Contains([]string{"RETURN", "ACCEPT"}, target) || strings.HasPrefix(target, ownPrefix)
}

// legacyTables returns which of the tables that nametap uses exist in legacy. If the kernel has not loaded
// ip_tables, no tables exist.
func legacyTables(f family.Family) ([]string, error) {
	name := "/proc/thread-self/net/ip_tables_names"
	if f == family.IPv6 {
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
