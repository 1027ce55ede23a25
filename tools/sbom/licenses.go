package main

import (
	"debug/buildinfo"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"unicode"
)

// licenseFile matches the names of files that must be distributed with a module.
var licenseFile = regexp.MustCompile(`(?i)^(licen[cs]e|copying|notice|patents)([.-].*)?$`)

// licenses returns the licenses and notices of Go and of the modules in binary. It reads them from Go's own directory
// and from the module cache.
func licenses(binary string) (string, error) {
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		return "", fmt.Errorf("reading what %s was built from: %w", binary, err)
	}
	env, err := exec.Command("go", "env", "GOMODCACHE", "GOROOT").Output() //nolint:noctx // it ends by itself
	if err != nil {
		return "", fmt.Errorf("asking go for its directories: %w", err)
	}
	dirs := strings.Split(strings.TrimSpace(string(env)), "\n")
	if len(dirs) != 2 {
		return "", fmt.Errorf("go env has printed %q, want two directories", env)
	}
	var text strings.Builder
	if err := writeLicenses(&text, "Go "+strings.TrimPrefix(runtime.Version(), "go"), dirs[1]); err != nil {
		return "", err
	}
	for _, dep := range info.Deps {
		if dep.Replace != nil {
			dep = dep.Replace
		}
		name := dep.Path + "@" + dep.Version
		if err := writeLicenses(&text, name, filepath.Join(dirs[0], escape(name))); err != nil {
			return "", err
		}
	}
	return text.String(), nil
}

// writeLicenses writes each license file in dir, the directory of the module name, below a heading. It returns an error
// if dir has none.
func writeLicenses(text *strings.Builder, name, dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("licenses of %s: %w", name, err)
	}
	entries = slices.DeleteFunc(entries, func(e os.DirEntry) bool { return e.IsDir() || !licenseFile.MatchString(e.Name()) })
	if len(entries) == 0 {
		return fmt.Errorf("licenses of %s: %s has none", name, dir)
	}
	for _, entry := range entries {
		content, err := os.ReadFile(filepath.Join(dir, entry.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(text, "==== %s: %s\n\n%s\n", name, entry.Name(), content)
	}
	return nil
}

// escape returns the name of a module's directory in the cache: each capital letter becomes an exclamation mark and the
// small letter.
func escape(name string) string {
	var b strings.Builder
	for _, r := range name {
		if unicode.IsUpper(r) {
			b.WriteByte('!')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}
