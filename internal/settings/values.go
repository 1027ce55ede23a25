package settings

import (
	"encoding"
	"encoding/csv"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// scalar is a setting of one value.
type scalar[T any] struct {
	p      *T
	kind   string // of value, in the help
	parse  func(string) (T, error)
	format func(T) string
}

// String returns the value as Set reads it.
func (v scalar[T]) String() string { return v.format(*v.p) }

// Set reads the value.
func (v scalar[T]) Set(s string) error {
	value, err := v.parse(s)
	if err == nil {
		*v.p = value
	}
	return err
}

// Type names the kind of value in the help.
func (v scalar[T]) Type() string { return v.kind }

// yesNo returns a flag value that is true or false. If negated is true, *p is the opposite of the value.
func yesNo(p *bool, negated bool) pflag.Value {
	parse := func(s string) (bool, error) {
		b, err := strconv.ParseBool(s)
		if err != nil {
			return false, errors.New("want true or false")
		}
		return b != negated, nil
	}
	return scalar[bool]{p, "bool", parse, func(b bool) string { return strconv.FormatBool(b != negated) }}
}

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

// textual returns a flag value for a type that reads and writes itself.
func textual(p TextValue) pflag.Value {
	format := func(p TextValue) string {
		text, _ := p.MarshalText() // "" if it has none
		return string(text)
	}
	return scalar[TextValue]{&p, "string", func(s string) (TextValue, error) { return p, p.UnmarshalText([]byte(s)) }, format}
}

// OneOf returns a flag value for a setting that is one of the given texts, or any text if none are given.
func OneOf[T ~string](p *T, values ...T) pflag.Value {
	parse := func(s string) (T, error) {
		if len(values) > 0 && !slices.Contains(values, T(s)) {
			texts := make([]string, len(values))
			for i, value := range values {
				texts[i] = string(value)
			}
			last := len(texts) - 1
			return "", fmt.Errorf("want %s or %s", strings.Join(texts[:last], ", "), texts[last])
		}
		return T(s), nil
	}
	return scalar[T]{p, "string", parse, func(value T) string { return string(value) }}
}

// A Zero says what 0 means if a user writes it as the value of a setting. This is needed because a zero field of a
// Config means the default.
type Zero int

// The meanings of 0.
const (
	ZeroRefused Zero = iota // 0 is refused
	ZeroIsZero              // 0 means 0, and is stored as 0
	ZeroIsNone              // 0 means none, and is stored as -1
)

// number returns a flag value that is a number, perhaps with a unit, and not negative.
func number[T ~int | ~int64](value scalar[T], zero Zero) pflag.Value {
	parse, format := value.parse, value.format
	value.parse = func(s string) (T, error) {
		v, err := parse(s)
		switch {
		case err != nil:
			return 0, err
		case v < 0:
			return 0, errors.New("want no negative value")
		case v == 0 && zero == ZeroRefused:
			return 0, errors.New("want more than 0")
		case v == 0 && zero == ZeroIsNone:
			v = -1
		}
		return v, nil
	}
	value.format = func(v T) string { return format(max(v, 0)) }
	return value
}

// Duration returns a flag value for a setting that is a length of time.
func Duration(p *time.Duration, zero Zero) pflag.Value {
	parse := func(s string) (time.Duration, error) {
		d, err := time.ParseDuration(s)
		if err != nil {
			return 0, errors.New("want a duration with its unit, such as 300ms, 5s or 2m")
		}
		return d, nil
	}
	return number(scalar[time.Duration]{p, "duration", parse, time.Duration.String}, zero)
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
	return number(scalar[int]{p, "int", parse, strconv.Itoa}, zero)
}

// Bytes returns a flag value for a setting that is a number of bytes. Users may write it
// with KiB or MiB.
func Bytes(p *int, zero Zero) pflag.Value {
	return number(scalar[int]{p, "bytes", parseBytes, formatBytes}, zero)
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
func Uint[T uint16 | uint32](p *T) pflag.Value {
	parse := func(s string) (T, error) { return parseUint[T](s, 0) } // as in Int
	return scalar[T]{p, "int", parse, func(v T) string { return fmt.Sprint(v) }}
}

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
