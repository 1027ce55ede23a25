package settings

import (
	"encoding"
	"encoding/csv"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// yesNo is a setting that is true or false.
type yesNo struct {
	p       *bool
	negated bool // whether *p is the opposite of the setting
}

// String returns true or false.
func (v yesNo) String() string { return strconv.FormatBool(*v.p != v.negated) }

// Set reads true or false.
func (v yesNo) Set(s string) error {
	b, err := strconv.ParseBool(s)
	if err != nil {
		return errors.New("want true or false")
	}
	*v.p = b != v.negated
	return nil
}

// Type names the kind of value in the help.
func (v yesNo) Type() string { return "bool" }

// A TextValue reads and writes itself as text. The error of UnmarshalText says what was expected; this package adds the
// name and the value of the setting.
type TextValue interface {
	encoding.TextMarshaler
	encoding.TextUnmarshaler
}

// A LogLevel is the least important level to log, at first info. It may change while loggers are in use.
type LogLevel struct{ *slog.LevelVar }

// MarshalText returns the name of the level in lower case.
func (l LogLevel) MarshalText() ([]byte, error) {
	return []byte(strings.ToLower(l.Level().String())), nil
}

// UnmarshalText reads the name of a level.
func (l LogLevel) UnmarshalText(text []byte) error {
	if l.LevelVar.UnmarshalText(text) != nil {
		return errors.New("want debug, info, warn or error")
	}
	return nil
}

// textual is a setting of a type that reads and writes itself.
type textual struct{ TextValue }

// String returns the text of the value, "" if it has none.
func (v textual) String() string {
	text, err := v.MarshalText()
	if err != nil {
		return ""
	}
	return string(text)
}

// Set reads the value.
func (v textual) Set(s string) error { return v.UnmarshalText([]byte(s)) }

// Type names the kind of value in the help.
func (v textual) Type() string { return "string" }

// OneOf returns a flag value for a setting that is one of the given texts, or any text if none are given.
func OneOf[T ~string](p *T, values ...T) pflag.Value { return oneOf[T]{p, values} }

// oneOf is a setting of [OneOf].
type oneOf[T ~string] struct {
	p      *T
	values []T
}

// String returns the text.
func (v oneOf[T]) String() string { return string(*v.p) }

// Set reads one of the values.
func (v oneOf[T]) Set(s string) error {
	if len(v.values) > 0 && !slices.Contains(v.values, T(s)) {
		texts := make([]string, len(v.values))
		for i, value := range v.values {
			texts[i] = string(value)
		}
		last := len(texts) - 1
		return fmt.Errorf("want %s or %s", strings.Join(texts[:last], ", "), texts[last])
	}
	*v.p = T(s)
	return nil
}

// Type names the kind of value in the help.
func (v oneOf[T]) Type() string { return "string" }

// A Zero says what 0 means if a user writes it as the value of a setting. This is needed because a zero field of a
// Config means the default.
type Zero int

// The meanings of 0.
const (
	ZeroRefused Zero = iota // 0 is refused
	ZeroIsZero              // 0 means 0, and is stored as 0
	ZeroIsNone              // 0 means none, and is stored as -1
)

// number is a setting that is a number, perhaps with a unit, and not negative.
type number[T ~int | ~int64] struct {
	p      *T
	kind   string
	zero   Zero
	parse  func(string) (T, error)
	format func(T) string
}

// String returns the number as Set reads it.
func (n number[T]) String() string { return n.format(max(*n.p, 0)) }

// Set reads the number.
func (n number[T]) Set(s string) error {
	v, err := n.parse(s)
	switch {
	case err != nil:
		return err
	case v < 0:
		return errors.New("want no negative value")
	case v == 0 && n.zero == ZeroRefused:
		return errors.New("want more than 0")
	case v == 0 && n.zero == ZeroIsNone:
		v = -1
	}
	*n.p = v
	return nil
}

// Type names the kind of value in the help.
func (n number[T]) Type() string { return n.kind }

// Duration returns a flag value for a setting that is a length of time.
func Duration(p *time.Duration, zero Zero) pflag.Value {
	parse := func(s string) (time.Duration, error) {
		d, err := time.ParseDuration(s)
		if err != nil {
			return 0, errors.New("want a duration with its unit, such as 300ms, 5s or 2m")
		}
		return d, nil
	}
	return number[time.Duration]{p, "duration", zero, parse, time.Duration.String}
}

// Int returns a flag value for a setting that is a number.
func Int(p *int, zero Zero) pflag.Value {
	parse := func(s string) (int, error) {
		n, err := strconv.ParseInt(s, 0, strconv.IntSize) // also 0x400, and 1_000 as in YAML
		if err != nil {
			return 0, errors.New("want a whole number")
		}
		return int(n), nil
	}
	return number[int]{p, "int", zero, parse, strconv.Itoa}
}

// Bytes returns a flag value for a setting that is a number of bytes. Users may write it
// with KiB or MiB.
func Bytes(p *int, zero Zero) pflag.Value {
	return number[int]{p, "bytes", zero, parseBytes, formatBytes}
}

func parseBytes(s string) (int, error) {
	digits, shift := s, 0
	if rest, ok := strings.CutSuffix(s, "KiB"); ok {
		digits, shift = rest, 10
	} else if rest, ok := strings.CutSuffix(s, "MiB"); ok {
		digits, shift = rest, 20
	}
	n, err := strconv.ParseInt(digits, 10, 33) // less than 4 Gi of bytes, KiB or MiB
	if err != nil {
		return 0, errors.New("want a number of bytes, alone or with KiB or MiB, such as 64MiB")
	}
	return int(n) << shift, nil
}

// formatBytes writes a size with the largest unit that divides it.
func formatBytes(n int) string {
	switch {
	case n != 0 && n%(1<<20) == 0:
		return strconv.Itoa(n>>20) + "MiB"
	case n != 0 && n%(1<<10) == 0:
		return strconv.Itoa(n>>10) + "KiB"
	default:
		return strconv.Itoa(n)
	}
}

// Uint returns a flag value for a setting that is a number from 0 to the largest of its type.
func Uint[T uint16 | uint32](p *T) pflag.Value { return unsigned[T]{p} }

// unsigned is a setting of [Uint].
type unsigned[T uint16 | uint32] struct{ p *T }

// String returns the number.
func (u unsigned[T]) String() string { return fmt.Sprint(*u.p) }

// Set reads the number.
func (u unsigned[T]) Set(s string) (err error) {
	v, err := parseUint[T](s, 0) // as in Int
	if err == nil {
		*u.p = v
	}
	return err
}

// Type names the kind of value in the help.
func (u unsigned[T]) Type() string { return "int" }

// ParseUint reads a number from 0 to the largest of its type.
func ParseUint[T uint16 | uint32](s string) (T, error) { return parseUint[T](s, 10) }

func parseUint[T uint16 | uint32](s string, base int) (T, error) {
	n, err := strconv.ParseUint(s, base, 64)
	if err != nil || uint64(T(n)) != n {
		return 0, fmt.Errorf("want a whole number from 0 to %d", ^T(0))
	}
	return T(n), nil
}

// ParseString takes any text as it is.
func ParseString(s string) (string, error) { return s, nil }

// list is a setting of several values. The first call of Set replaces the default; further calls add values.
type list[T any] struct {
	p     *[]T
	parse func(string) (T, error)
	set   bool
}

// List returns a flag value for a setting that is a list. Users write the values one by one, or separated by commas.
// Each value must print as a text that the function parse reads.
func List[T any](p *[]T, parse func(string) (T, error)) pflag.Value {
	return &list[T]{p: p, parse: parse}
}

// String returns all values in brackets.
func (l *list[T]) String() string { return "[" + strings.Join(l.GetSlice(), ",") + "]" }

// Type names the kind of value in the help.
func (l *list[T]) Type() string { return "strings" }

// Set adds the values of a text, which are separated by commas.
func (l *list[T]) Set(s string) error {
	texts, err := csv.NewReader(strings.NewReader(s)).Read()
	if err != nil && s != "" {
		return fmt.Errorf("want values separated by commas: %w", err)
	}
	values, err := l.read(texts)
	if err != nil {
		return err
	}
	if l.set {
		values = append(*l.p, values...)
	}
	*l.p, l.set = values, true
	return nil
}

// Append adds one value.
func (l *list[T]) Append(s string) error {
	values, err := l.read([]string{s})
	if err == nil {
		*l.p = append(*l.p, values...)
	}
	return err
}

// Replace replaces all values.
func (l *list[T]) Replace(texts []string) error {
	values, err := l.read(texts)
	if err == nil {
		*l.p, l.set = values, true
	}
	return err
}

// GetSlice returns the texts of the values.
func (l *list[T]) GetSlice() []string {
	texts := make([]string, len(*l.p))
	for i, v := range *l.p {
		texts[i] = fmt.Sprint(v)
	}
	return texts
}

// read parses every text. If there are several texts, the error quotes the malformed text.
func (l *list[T]) read(texts []string) ([]T, error) {
	values := make([]T, 0, len(texts))
	for _, text := range texts {
		v, err := l.parse(text)
		if err != nil && len(texts) > 1 && !strings.Contains(err.Error(), strconv.Quote(text)) {
			err = fmt.Errorf("%q: %w", text, err)
		}
		if err != nil {
			return nil, err
		}
		values = append(values, v)
	}
	return values, nil
}

// Reachable returns the address at which clients reach a server that listens on addr, a host:port. The host of the
// address is localhost if the server listens on all addresses.
func Reachable(addr string) (string, error) {
	host, port, err := net.SplitHostPort(addr)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil {
		return "", errors.New("want host:port")
	}
	if ip, err := netip.ParseAddr(host); host == "" || err == nil && ip.IsUnspecified() {
		host = "localhost"
	}
	return net.JoinHostPort(host, port), nil
}
