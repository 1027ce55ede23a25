package object

import "strings"

const (
	maxHostLength  = 253
	maxLabelLength = 63
	wildcardPrefix = "*."
)

// IsWildcard reports whether a host has the form *.suffix, which stands for all names below suffix.
func IsWildcard(host string) bool { return strings.HasPrefix(host, wildcardPrefix) }

// IsHost reports whether s is a DNS name, with or without a leading "*.".
func IsHost(s string) bool {
	s = strings.TrimPrefix(s, wildcardPrefix)
	if s == "" || len(s) > maxHostLength {
		return false
	}
	for label := range strings.SplitSeq(s, ".") {
		if !IsLabel(label) {
			return false
		}
	}
	return true
}

// IsLabel reports whether s is a label of a DNS name. Underscores are not valid in host names,
// but they are in use, so IsLabel allows them.
func IsLabel(s string) bool {
	if s == "" || len(s) > maxLabelLength || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	for _, c := range []byte(s) {
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-', c == '_':
		default:
			return false
		}
	}
	return true
}

// ImportHost returns the host of a ServiceImport (KEP-1645). It may be longer than a DNS name.
func ImportHost(k Key) string { return k.Name + "." + k.Namespace + ".svc.clusterset.local" }
