package decode

import (
	"fmt"
	"math"
	"net/netip"
	"strconv"

	"github.com/nametap/nametap/discovery/object"
)

// A Kind is the kind of a [Value].
type Kind uint8

// The kinds of values are those of JSON, but integers have a kind of their own.
const (
	Null  Kind = iota
	Other      // none of the other kinds
	Object
	List
	String
	Integer
	Number // not an integer
	Boolean
)

// A Value is an object, or a part of one, in the form of its source. For example, the value of an object in a file is a
// YAML node.
type Value interface {
	// Kind returns the kind of the value.
	Kind() Kind
	// Member returns an object's member with the given name; nil if the member is missing or null. The error says what
	// is wrong with the member, for example that it occurs twice. The returned member is used even if there is an
	// error.
	Member(name string) (Value, error)
	// Names returns the names of the members of an object, in any order.
	Names() []string
	// Len returns the number of elements of a list, and At returns one of them.
	Len() int
	At(index int) Value
	// Text returns the text of a value that is neither an object nor a list: the content of a string, or for example
	// "1.5" or "true".
	Text() string
}

// A Field is a value in an object, with the path of the value. The methods of an absent field return the zero value,
// and report no error.
type Field struct {
	Value Value // nil if the field is absent
	Path  string

	report Report
}

// A Report is called with each error in a field. The field may be absent. The same error may come twice.
type Report func(f Field, message string)

// NewField returns the field of a value, which may be nil. The field and its members pass their errors to
// report.
func NewField(v Value, path string, report Report) Field { return Field{v, path, report} }

// Present reports whether the field has a value.
func (f Field) Present() bool { return f.Value != nil }

// Fail reports an error in the field.
func (f Field) Fail(format string, args ...any) { f.report(f, fmt.Sprintf(format, args...)) }

// Missing reports that the object f has no member with the given name. The parameter advice is the end of the message.
// The report receives the value of f, because the member has none. So the error of an object in a file names the line
// of f.
func (f Field) Missing(name, advice string) {
	f.report(Field{f.Value, join(f.Path, name), f.report}, "is missing"+advice)
}

// WithReport returns the field with another report. The errors of its members go there, too.
func (f Field) WithReport(report Report) Field {
	f.report = report
	return f
}

// hasKind reports whether the field is present and its value is of a kind. If the value is of another kind, hasKind
// calls Fail. The parameter want is the text for the wanted kind in this error.
func (f Field) hasKind(kind Kind, want string) bool {
	if f.Value == nil {
		return false
	}
	if f.Value.Kind() != kind {
		f.Fail("want %s, got %s", want, describe(f.Value))
		return false
	}
	return true
}

func describe(v Value) string {
	switch v.Kind() {
	case Object:
		return "an object"
	case List:
		return "a list"
	case String:
		return fmt.Sprintf("the string %q", v.Text())
	case Integer:
		return "the integer " + v.Text()
	case Number:
		return "the number " + v.Text()
	case Boolean:
		return "the boolean " + v.Text()
	}
	return fmt.Sprintf("%q", v.Text())
}

// Member returns an object's member with the given name.
func (f Field) Member(name string) Field {
	member := Field{Path: join(f.Path, name), report: f.report}
	if !f.hasKind(Object, "an object") {
		return member
	}
	var err error
	if member.Value, err = f.Value.Member(name); err != nil {
		member.Fail("%v", err)
	}
	return member
}

func join(parent, name string) string {
	if parent == "" {
		return name
	}
	return parent + "." + name
}

// IsString reports whether the field is a string.
func (f Field) IsString() bool { return f.Value != nil && f.Value.Kind() == String }

// Text returns a string.
func (f Field) Text() string {
	if !f.hasKind(String, "a string") {
		return ""
	}
	return f.Value.Text()
}

// boolean returns a boolean, or fallback if the field is absent or invalid.
func (f Field) boolean(fallback bool) bool {
	if !f.hasKind(Boolean, "a boolean") {
		return fallback
	}
	return f.Value.Text() == "true"
}

// port returns the number of a port, or 0 if the field is absent or invalid.
func (f Field) port() uint16 {
	if f.Value == nil {
		return 0
	}
	n, err := strconv.ParseUint(f.Value.Text(), 0, 16)
	if f.Value.Kind() != Integer || err != nil || n == 0 || n > math.MaxUint16 {
		f.Fail("want a port number, 1 to 65535, got %s", describe(f.Value))
		return 0
	}
	return uint16(n)
}

// Elements returns the elements of a list. It leaves out elements that are null, and reports an error for each.
func (f Field) Elements() []Field {
	if !f.hasKind(List, "a list") {
		return nil
	}
	n := f.Value.Len()
	all := make([]Field, 0, n)
	for i := range n {
		e := Field{f.Value.At(i), f.Path + "[" + strconv.Itoa(i) + "]", f.report}
		if e.Value.Kind() == Null {
			e.Fail("is empty")
			continue
		}
		all = append(all, e)
	}
	return all
}

// members returns the members of an object by their names; nil if the field is absent.
func (f Field) members() map[string]Field {
	if !f.hasKind(Object, "an object") {
		return nil
	}
	names := f.Value.Names()
	all := make(map[string]Field, len(names))
	for _, name := range names {
		all[name] = f.Member(name)
	}
	return all
}

// texts returns an object whose values are strings.
func (f Field) texts() map[string]string {
	members := f.members()
	if members == nil {
		return nil
	}
	all := make(map[string]string, len(members))
	for name, member := range members {
		all[name] = member.Text()
	}
	return all
}

// ports returns an object whose values are numbers of ports. Invalid ones are left out.
func (f Field) ports() map[string]uint16 {
	all := map[string]uint16{}
	for name, member := range f.members() {
		if n := member.port(); n != 0 {
			all[name] = n
		}
	}
	return all
}

// addr returns an IP address, and false if the field is absent, empty or invalid.
func (f Field) addr() (netip.Addr, bool) {
	text := f.Text()
	if text == "" {
		return netip.Addr{}, false
	}
	a, err := netip.ParseAddr(text)
	if err != nil || a.Zone() != "" {
		f.Fail("want an IP address, got %q", text)
		return netip.Addr{}, false
	}
	return a.Unmap(), true
}

// addrs returns a list of IP addresses.
func (f Field) addrs() []netip.Addr {
	var all []netip.Addr
	for _, e := range f.Elements() {
		if a, ok := e.addr(); ok {
			all = append(all, a)
		}
	}
	return all
}

// exportTo returns the ExportTo for a list of scopes. The list is from the field f of an object in a namespace. Invalid
// scopes are left out, and the others are used. If all were ignored, a host that its author wanted to hide would be
// visible: so a field with content, but without a scope, names no namespace.
func (f Field) exportTo(scopes []string, namespace string) object.ExportTo {
	e, err := object.NewExportTo(scopes, namespace)
	if err != nil {
		f.Fail("%v", err)
	}
	if len(scopes) == 0 && f.Present() && !f.isEmpty() {
		e.Restricted = true
	}
	return e
}

// isEmpty reports whether the field is an empty list or an empty string.
func (f Field) isEmpty() bool {
	switch f.Value.Kind() {
	case List:
		return f.Value.Len() == 0
	case String:
		return f.Value.Text() == ""
	default:
		return false
	}
}
