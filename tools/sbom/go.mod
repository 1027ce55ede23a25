module github.com/nametap/nametap/tools/sbom

go 1.26.0
