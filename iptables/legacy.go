package iptables

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/nametap/nametap/internal/family"
)

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
	return slices.DeleteFunc(strings.Fields(string(text)), func(table string) bool { return !slices.Contains(tableNames(), table) }), nil
}
